"""Learner and servers take turns with memory: never both at once, whatever fails in between."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.memory import MemoryTurns
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge import wire
from sglang_bridge.errors import WeightSyncFailed
from tests.support.scripted_servers import A, B, C, Learner, Servers, loser

LIMIT_S = 30.0
SENT = ["pause", "begin", "send", "flush", "end"]


class Trainer(Learner):
    """A learner that takes the memory of a card which servers use too."""

    def __init__(self, servers: Servers) -> None:
        self.servers, self.resident = servers, False
        self.fails: list[Exception] = []

    async def onload(self) -> None:
        self.servers.log.append("onload")
        if self.fails:
            raise self.fails.pop()
        answering = [url for url in self.servers.urls if url not in self.servers.lost]
        held = [url for url in answering if self.servers.given_up[url] != set(wire.MEMORY_TAGS)]
        assert held == [], "servers hold memory that the learner takes"
        self.resident = True

    async def offload(self) -> None:
        self.servers.log.append("offload")
        self.resident = False


class Fleet(Servers):
    """Servers that take nothing back before the learner gave it up, nor sample without it."""

    trainer: Trainer

    async def resume_memory(self, tags: Any = wire.MEMORY_TAGS) -> None:
        assert not self.trainer.resident, "the learner holds memory that servers take"
        await super().resume_memory(tags)

    async def send(self, version: int) -> None:
        assert not any(wire.WEIGHTS in self.given_up[url] for url in self.urls), "no room to write"
        await super().send(version)

    async def resume(self) -> None:
        assert not any(self.given_up[url] for url in self.urls), "it samples without its cache"
        await super().resume()


Scenario = Callable[[Fleet, Trainer, WeightSync], Any]


def scripted(scenario: Scenario, *, least: int = 1, tries: int = 3) -> Fleet:
    """Runs a scenario on an opened weight sync of three servers; what they were asked."""
    servers = Fleet()
    servers.stages = False
    trainer = servers.trainer = Trainer(servers)
    config = WeightSyncConfig(timeout_s=LIMIT_S, tries=tries)
    turns = MemoryTurns(servers, trainer)
    sync = WeightSync(servers, trainer, servers, config, loser(servers, least), turns)

    async def run() -> None:
        await sync.open()
        servers.log.clear()
        await scenario(servers, trainer, sync)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(run())
    return servers


def test_memory_changes_hands_in_order():
    async def two_windows(servers: Fleet, trainer: Trainer, sync: WeightSync) -> None:
        for version in (1, 1):
            await sync.make_room()
            assert trainer.resident
            assert all(servers.given_up[url] for url in servers.urls)
            report = await sync.sync(version)
            assert not trainer.resident
            # the fake takes 0.1 s a step of the servers
            assert report.release_s == pytest.approx(0.1)
            assert report.resume_s == pytest.approx(0.2)

    first = ["release", "onload", "offload", "resume weights", *SENT, "verify live"]
    last = ["resume kv_cache", "continue", "versions"]
    log = scripted(two_windows).log
    assert log[: len(first) + len(last)] == [*first, *last]
    assert log[len(first) + len(last) :] == [*first[:-1], *last]


def test_a_run_whose_parts_share_nothing_takes_no_such_step():
    servers = Servers()

    async def run() -> None:
        sync = WeightSync(servers, Learner(), servers, WeightSyncConfig(), loser(servers, 1))
        await sync.open()
        await sync.make_room()
        report = await sync.sync(1)
        await sync.restore_memory([A])
        assert report.release_s is None

    run_virtual(run())
    assert not {"release", "resume weights", "resume kv_cache", f"restore {A}"} & {*servers.log}


@pytest.mark.parametrize("step", ["release", "resume weights", "resume kv_cache"])
def test_a_server_that_dies_while_memory_changes_hands_is_given_up(step: str):
    async def one_window(servers: Fleet, trainer: Trainer, sync: WeightSync) -> None:
        def dies(_: Servers) -> Exception | None:
            if B not in servers.urls:
                return None
            servers.lost.add(B)
            return WeightSyncFailed(f"{B} is gone", [B])

        servers.faults[step] = dies
        await sync.make_room()
        await sync.sync(1)
        assert servers.urls == (A, C)
        assert all(servers.samples[url] and servers.version[url] == 1 for url in servers.urls)
        assert not any(servers.given_up[url] for url in servers.urls)

    log = scripted(one_window).log
    assert f"drop {B}" in log
    assert log[log.index("abandon") :].count(step) == 1, "it is taken again, by the others"


def test_a_server_that_comes_back_in_an_update_has_nothing_to_take_back():
    async def one_window(servers: Fleet, trainer: Trainer, sync: WeightSync) -> None:
        await sync.make_room()
        servers.drop(B)
        servers.add(B)
        await sync.sync(1)
        assert servers.urls == (A, C, B)
        assert all(servers.samples[url] for url in servers.urls)

    scripted(one_window)


def test_room_that_cannot_be_made_fails_and_leaves_the_servers_whole():
    async def never(servers: Fleet, trainer: Trainer, sync: WeightSync) -> None:
        trainer.fails = [RuntimeError("out of memory") for _ in range(9)]
        with pytest.raises(WeightSyncFailed, match=r"2 tries failed, .* onload: out of memory"):
            await sync.make_room()
        assert not any(servers.given_up.values())

    log = scripted(never, tries=2).log
    assert log == ["release", "onload", "abandon"] * 2


def test_servers_that_stay_busy_are_given_up_in_time():
    async def busy(servers: Fleet, trainer: Trainer, sync: WeightSync) -> None:
        servers.lost = {A, B, C}
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(WeightSyncFailed, match="release: not done within"):
            await sync.make_room()
        assert asyncio.get_running_loop().time() - began_s <= LIMIT_S + 0.1

    scripted(busy, least=3)


def test_a_learner_that_was_lost_in_an_update_finds_servers_that_wait_with_their_memory():
    async def lost(servers: Fleet, trainer: Trainer, sync: WeightSync) -> None:
        await sync.make_room()
        trainer.resident = False  # another process, which has offloaded itself
        await sync.start_over()
        assert not any(servers.given_up.values())
        assert not any(servers.samples.values()), "with which weights is not known"
        await sync.sync(1)
        assert all(servers.samples.values())

    scripted(lost)


def test_servers_of_others_are_left_whole_and_only_they():
    async def stopped(servers: Fleet, trainer: Trainer, sync: WeightSync) -> None:
        await sync.make_room()
        await sync.restore_memory([A, B])
        assert [url for url in servers.urls if servers.given_up[url]] == [C]

    assert scripted(stopped).log[-1] == f"restore {A} {B}"


def test_what_servers_cannot_free_is_said_once(caplog: pytest.LogCaptureFixture):
    async def windows(servers: Fleet, trainer: Trainer, sync: WeightSync) -> None:
        servers.frees = frozenset({wire.KV_CACHE})
        for _ in range(3):
            await sync.make_room()
            await sync.sync(1)

    scripted(windows)
    told = [entry.getMessage() for entry in caplog.records]
    assert len(told) == 3, "once for each server"
    for url, line in zip((A, B, C), told, strict=True):
        assert f"{url} frees no GPU memory of weights" in line
