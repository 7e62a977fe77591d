"""A weight sync that fails is tried again, without the servers that are lost; time is bounded."""

import asyncio
from typing import Any

import pytest

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.controller.turn import Turn
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.errors import WeightSyncFailed
from tests.support.scripted_servers import A, B, C, D, Fault, Learner, Servers, loser

LIMIT_S = 30.0
STEPS = ("stage", "verify", "pause", "begin", "send", "flush", "end", "verify live", "continue")


async def synced(
    servers: Servers, *, least: int = 1, tries: int = 3, limit_s: float = LIMIT_S
) -> WeightSyncReport:
    """Version 1 on all servers, within the limit; or the failure, within the limit."""
    config = WeightSyncConfig(timeout_s=LIMIT_S, tries=tries, staging=True)
    sync = WeightSync(servers, Learner(), servers, config, loser(servers, least))
    await sync.open()
    servers.log.clear()
    began = asyncio.get_running_loop().time()
    try:
        return await sync.sync(1)
    finally:
        assert asyncio.get_running_loop().time() - began <= limit_s + 0.1
        assert len(asyncio.all_tasks()) == 1


def require_served(servers: Servers, *urls: str) -> None:
    """These and no others hold the version and sample from it."""
    assert servers.urls == urls
    for url in urls:
        assert (servers.held[url], servers.version[url], servers.samples[url]) == (1, 1, True)


def fails(times: int, *at_fault: str) -> Fault:
    """A step that fails so many times."""
    left = [times]

    def fault(servers: Servers) -> Exception | None:
        left[0] -= 1
        here = [url for url in at_fault if url in servers.urls]
        if left[0] < 0 or (at_fault and not here):
            return None
        return WeightSyncFailed(f"{' '.join(at_fault)}: no", at_fault)

    return fault


@pytest.mark.parametrize("step", STEPS)
def test_what_fails_once_is_tried_again_with_all_servers(step: str):
    servers = Servers()
    servers.faults[step] = fails(1, B)
    report = run_virtual(synced(servers))
    assert report.tries == 2
    require_served(servers, A, B, C)
    assert servers.log.index("abandon") < servers.log.index("reopen")
    # what a failed try left there is compared once it is live
    assert servers.log[-3:] == ["verify live", "continue", "versions"]


@pytest.mark.parametrize("step", STEPS)
def test_the_others_serve_without_a_server_that_is_lost(step: str):
    """It is lost while the step is taken: silent from then on."""
    servers = Servers()

    def lose_one(servers: Servers) -> None:
        servers.lost.add(B)

    servers.faults[step] = lose_one
    report = run_virtual(synced(servers))
    assert report.tries == 2
    require_served(servers, A, C)
    assert servers.log.count("drop http://b:2") == 1


def test_servers_are_lost_one_after_the_other():
    servers = Servers()

    def lose(servers: Servers) -> None:
        servers.lost.add(B if B in servers.urls else C)

    servers.faults["send"] = lose
    with pytest.raises(WeightSyncFailed, match=rf"{A}: no answer|too few servers are left|3 tries"):
        run_virtual(synced(servers, least=2))
    assert C in servers.urls, "one more would be too few"
    servers = Servers()
    first = [B, C]
    servers.faults["send"] = lambda s: s.lost.add(first.pop(0)) if first else None
    assert run_virtual(synced(servers)).tries == 3
    require_served(servers, A)


@pytest.mark.parametrize("step", STEPS)
def test_a_server_that_fails_twice_is_given_up(step: str):
    servers = Servers()
    servers.faults[step] = fails(99, B)
    report = run_virtual(synced(servers))
    assert report.tries == 3
    require_served(servers, A, C)


@pytest.mark.parametrize("step", STEPS)
def test_the_last_server_is_never_given_up(step: str):
    servers = Servers((A,))
    servers.faults[step] = lambda s: s.lost.add(A)
    message = rf"^{step}: not done within 8 s .*; no answer from {A}; without {A} too few servers"
    with pytest.raises(WeightSyncFailed, match=message):
        run_virtual(synced(servers))
    assert not (servers.samples[A] and servers.log[-1] == "continue")
    servers = Servers((A,))
    servers.faults[step] = fails(99, A)
    with pytest.raises(WeightSyncFailed, match=f"{step}: {A}: no; without {A} too few servers"):
        run_virtual(synced(servers))


def test_a_failure_that_is_nobody_s_fault_ends_with_the_tries():
    servers = Servers()
    servers.faults["send"] = fails(99)
    with pytest.raises(WeightSyncFailed, match=r"^3 tries failed, the last one: send: : no$"):
        run_virtual(synced(servers))
    assert servers.urls == (A, B, C)
    assert not any(servers.samples.values()), "a mixture of versions would be sampled"
    servers = Servers()
    servers.faults["send"] = fails(1)
    with pytest.raises(WeightSyncFailed, match=r"^send: : no$"):
        run_virtual(synced(servers, tries=1))


def test_a_try_that_lost_a_server_does_not_count():
    """Before: three servers that failed in one weight sync ended a run with a fourth one left."""
    servers = Servers((A, B, C, D))
    going = [A, B, C]
    servers.faults["send"] = lambda s: s.lost.add(going.pop(0)) if going else None
    assert run_virtual(synced(servers, limit_s=LIMIT_S * 4 / 3)).tries == 4
    require_served(servers, D)


def test_a_server_that_came_back_is_not_blamed_for_what_the_one_before_it_did():
    """Before: it was lost again with every try that failed, also by the learner's fault."""
    servers = Servers((A, B))
    blamed = [B, B, ""]

    def fault(servers: Servers) -> Exception | None:
        if not blamed:
            return None
        if not (url := blamed.pop(0)):
            return WeightSyncFailed("the learner is gone")
        return WeightSyncFailed(f"{url}: no", [url])

    def back_at_once(url: str) -> None:
        Servers.drop(servers, url)
        servers.add(url)

    servers.drop = back_at_once  # type: ignore[method-assign]
    servers.faults["send"] = fault
    assert run_virtual(synced(servers, limit_s=LIMIT_S * 4 / 3)).tries == 4
    assert servers.log.count(f"drop {B}") == 1
    require_served(servers, A, B)


def test_one_try_is_not_repeated_though_it_lost_a_server():
    servers = Servers()
    servers.faults["send"] = lambda s: s.lost.add(A)
    with pytest.raises(WeightSyncFailed, match="send: not done within"):
        run_virtual(synced(servers, tries=1, limit_s=LIMIT_S))


def test_servers_that_go_between_two_weight_syncs_are_not_waited_for():
    servers = Servers()
    config = WeightSyncConfig(timeout_s=LIMIT_S)

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, config)
        await sync.open()
        assert (await sync.sync(1)).tries == 1
        servers.drop(B)
        servers.log.clear()
        assert (await sync.sync(1)).tries == 1
        assert servers.log[:2] == ["reopen", "stage"]
        servers.log.clear()
        await sync.sync(1)
        assert "reopen" not in servers.log

    run_virtual(scenario())


def test_servers_that_outlived_their_controller_sample_nothing_but_the_new_ones_weights():
    """Before: "already holds version 5 of another run: restart it"."""
    servers = Servers((A, B))
    servers.version |= {A: 5, B: 6}  # it was killed in a weight sync
    servers.updating.add(A)

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig())
        await sync.open(used=True)
        assert servers.log[:2] == ["abort", "abandon"]
        assert not any(servers.samples.values()), "they hold weights of another version"
        servers.log.clear()
        assert (await sync.sync(1)).tries == 1
        assert "verify live" in servers.log
        require_served(servers, A, B)

    run_virtual(scenario())


def test_servers_of_another_run_are_not_taken():
    servers = Servers((A,))
    servers.version[A] = 5

    async def scenario() -> None:
        await WeightSync(servers, Learner(), servers, WeightSyncConfig()).open()

    with pytest.raises(WeightSyncFailed, match=f"{A} already holds version 5 of another run"):
        run_virtual(scenario())


def test_a_server_that_is_back_takes_part_and_is_verified():
    servers = Servers()

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig(verify_every=0))
        await sync.open()
        await sync.sync(1)
        await sync.sync(1)
        assert "verify live" not in servers.log[-6:], "nothing is due"
        servers.drop(B)
        servers.add(B)
        assert servers.urls == (A, C), "it has other weights until the next weight sync"
        servers.log.clear()
        assert (await sync.sync(1)).tries == 1
        assert servers.log[0] == "reopen"
        assert "verify live" in servers.log
        require_served(servers, A, C, B)

    run_virtual(scenario())


@pytest.mark.parametrize("step", STEPS)
def test_a_weight_sync_waits_for_the_only_server_to_be_back(step: str):
    """The wait is not the sync's: it may take longer than weight_sync.timeout_s."""
    servers = Servers((A,))
    servers.faults[step] = lambda s: s.lost.add(A) if s.epoch == 0 else None

    def lose(url: str, why: str) -> bool:
        servers.drop(url)
        asyncio.get_running_loop().call_later(2 * LIMIT_S, servers.add, url)
        return True

    async def scenario() -> WeightSyncReport:
        config = WeightSyncConfig(timeout_s=LIMIT_S, staging=True)
        sync = WeightSync(servers, Learner(), servers, config, lose)
        await sync.open()
        return await sync.sync(1)

    assert run_virtual(scenario()).tries == 2
    require_served(servers, A)


def test_the_current_version_is_synced_again_if_no_other_server_is_left():
    servers = Servers((A, B))

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig())
        await sync.open()
        await sync.sync(1)
        free = asyncio.Lock()
        newer = False
        serving = asyncio.create_task(sync.serve_on(lambda: None if newer else 1, free))
        servers.drop(B)
        servers.add(B)
        await asyncio.sleep(100)
        assert servers.urls == (A,), "A serves meanwhile: B waits for the next version"
        async with free:  # the learner trains
            servers.drop(A)
            newer = True
            await asyncio.sleep(100)
            assert not servers.samples[B]
        await asyncio.sleep(10)
        assert not servers.samples[B], "the next version is about to be synced"
        newer = False
        await asyncio.sleep(10)
        require_served(servers, B)
        assert not serving.done()
        serving.cancel()

    run_virtual(scenario())


def test_two_weight_syncs_are_never_made_at_once():
    servers = Servers((A,))

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig())
        await sync.open()
        servers.log.clear()
        await asyncio.gather(sync.sync(1), sync.sync(1))
        half = len(servers.log) // 2
        assert "continue" in servers.log[:half]
        assert "continue" in servers.log[half:]

    run_virtual(scenario())


class Busy:
    """A turn with a learner whose next update takes ten times what a weight sync may take."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def release(self) -> None:
        self.servers.log.append("released")

    async def take_back(self) -> None:
        self.servers.log.append("take back")
        assert not any(self.servers.samples.values()), "what failed may be sampled meanwhile"
        await asyncio.sleep(10 * LIMIT_S)


def overlapping(servers: Servers, **config: Any) -> WeightSync:
    settings = WeightSyncConfig(timeout_s=LIMIT_S, staging=True, overlap=True, **config)
    return WeightSync(servers, Learner(), servers, settings, loser(servers, 1))


def test_the_learner_is_released_unless_digests_are_due():
    servers = Servers()
    logs: list[list[str]] = []

    async def scenario() -> None:
        sync = overlapping(servers, verify_every=2)
        await sync.open()
        for _ in range(4):
            servers.log.clear()
            report = await sync.sync(1, Busy(servers))
            assert report.phases[0].name == "start"
            logs.append([*servers.log])

    run_virtual(scenario())
    assert ["released" in log for log in logs] == [False, True, False, True]
    assert logs[1][:4] == ["start", "released", "stage", "pause"]


def test_another_try_waits_for_the_update_outside_of_its_limits():
    """It then has the learner, which digests what is sent once more."""
    servers = Servers()

    async def scenario() -> WeightSyncReport:
        sync = overlapping(servers)
        await sync.open()
        await sync.sync(1, Busy(servers))
        servers.faults["send"] = fails(2, B)
        servers.log.clear()
        return await sync.sync(1, Busy(servers))

    report = run_virtual(scenario())
    assert report.tries == 3
    require_served(servers, A, C)
    assert servers.log.count("released") == 1
    again = servers.log[servers.log.index("take back") :]
    assert again[:4] == ["take back", "reopen", "start", "stage"]
    assert "verify" in again


def test_all_servers_may_change_while_an_update_runs_beside_the_weight_sync():
    """Whoever waits to serve on must not keep the learner from the second try."""
    servers = Servers((A, B))

    def replaced(servers: Servers) -> None:
        if A in servers.urls:
            servers.drop(A)
            servers.add(B)

    async def scenario() -> WeightSyncReport:
        sync = overlapping(servers)
        await sync.open()
        servers.drop(B)
        await sync.sync(1)
        learner = asyncio.Lock()
        serving = asyncio.create_task(sync.serve_on(lambda: None, learner))
        servers.faults |= {"pause": replaced, "send": fails(1)}
        turn = Turn(learner)
        await turn.begin(early=True)
        report = await sync.sync(1, turn)
        turn.end()
        serving.cancel()
        return report

    assert run_virtual(asyncio.wait_for(scenario(), 1e4)).tries == 2
    require_served(servers, B)


@pytest.mark.parametrize("step", ["versions", "open"])
def test_opening_is_tried_again_and_nobody_stays_paused(step: str):
    servers = Servers()
    servers.faults[step] = lambda s: s.lost.add(B) if B in s.urls else None

    async def scenario() -> None:
        config = WeightSyncConfig(timeout_s=LIMIT_S)
        sync = WeightSync(servers, Learner(), servers, config, loser(servers, 1))
        await sync.open()
        assert servers.urls == (A, C)
        assert servers.samples[A]
        assert servers.samples[C]
        await sync.sync(1)
        require_served(servers, A, C)

    run_virtual(scenario())


def test_a_server_of_another_run_is_not_tried_again():
    servers = Servers()
    servers.version[B] = 7

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig(), loser(servers, 1))
        with pytest.raises(WeightSyncFailed, match=f"{B} already holds version 7 of another run"):
            await sync.open()

    run_virtual(scenario())
    assert servers.log == ["versions"]


def test_a_server_leaves_between_two_weight_syncs():
    """It waits for the end of one that is under way; the others are connected anew."""
    servers = Servers()

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig(timeout_s=LIMIT_S))
        await sync.open()
        syncing = asyncio.create_task(sync.sync(1))
        await asyncio.sleep(0.25)
        parting = asyncio.create_task(sync.remove_server(B, lambda: servers.drop(B)))
        await syncing
        assert f"drop {B}" not in servers.log
        assert await parting is None
        assert servers.log[-2:] == ["close", f"drop {B}"]
        assert (servers.held[B], servers.samples[B]) == (1, True)
        servers.log.clear()
        servers.urls = (A, C)
        report = await sync.sync(1)
        assert servers.log[0] == "reopen"
        assert report.servers == (A, C)

    run_virtual(scenario())


def test_a_server_leaves_a_run_whose_others_do_not_answer():
    servers = Servers()

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig(timeout_s=LIMIT_S))
        await sync.open()
        servers.lost.add(C)
        assert "no answer within" in str(await sync.remove_server(B, lambda: servers.drop(B)))
        assert servers.urls == (A, C)

    run_virtual(scenario())


def test_a_server_that_has_no_weights_yet_just_leaves():
    servers = Servers()

    async def scenario() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig(timeout_s=LIMIT_S))
        await sync.open()
        servers.log.clear()
        servers.add("http://d:4")
        assert await sync.remove_server("http://d:4", servers.waiting.clear) is None
        assert (servers.log, servers.waiting) == ([], [])

    run_virtual(scenario())
