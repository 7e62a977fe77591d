"""The student's servers score in their share of the time, of one version, and never stand still."""

import asyncio
import random

import pytest

from megatron_opd.rollout.student_share import SAVED_S, StudentShare
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.live import LiveVersion
from sglang_bridge.errors import BadReply


class Servers:
    """Sample `sampling` requests all the time, and score others; count the seconds of scoring."""

    def __init__(self, sampling: int) -> None:
        self.sampling, self.scoring = sampling, 0
        self.busy_s, self.since_s = 0.0, 0.0
        self.order: list[int] = []

    def in_flight(self) -> int:
        return self.sampling + self.scoring

    async def score(self, number: int, takes_s: float) -> int:
        loop = asyncio.get_running_loop()
        if not self.scoring:
            self.since_s = loop.time()
        self.scoring += 1
        self.order.append(number)
        await asyncio.sleep(takes_s)
        self.scoring -= 1
        if not self.scoring:
            self.busy_s += loop.time() - self.since_s
        return number


async def all_scores(
    servers: Servers, share: StudentShare, times: list[float], gaps: list[float] | None = None
) -> list[tuple[int, int]]:
    async def one(number: int, takes_s: float) -> tuple[int, int]:
        await asyncio.sleep(0 if gaps is None else sum(gaps[:number]))
        return await share.of_one_version(lambda: servers.score(number, takes_s))

    return list(await asyncio.gather(*(one(n, each) for n, each in enumerate(times))))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(20))
def test_scores_take_their_share_of_the_time(share: float, seed: int):
    rng, servers = random.Random(seed), Servers(sampling=3)
    times = [rng.expovariate(1 / rng.choice([0.01, 0.3, 3])) for _ in range(60)]
    gaps = [rng.choice([0, 0.1, 2]) for _ in times]

    async def scenario() -> float:
        paced = StudentShare(LiveVersion(), share, servers.in_flight)
        found = await all_scores(servers, paced, times, gaps)
        assert found == [(number, 0) for number in range(len(times))]
        return asyncio.get_running_loop().time()

    took_s = run_virtual(scenario())
    # what was begun together ends with the longest of it
    assert servers.busy_s <= share * took_s + SAVED_S + max(times)
    came_s = [sum(gaps[:number]) for number in servers.order]
    assert came_s == sorted(came_s), "first come, first served"


def test_scores_without_a_share_would_take_all_of_it():
    servers, times = Servers(sampling=3), [0.5] * 40

    async def unpaced() -> float:
        live, lock = LiveVersion(), asyncio.Lock()
        for number, takes_s in enumerate(times):
            async with lock:
                await live.of_one_version(lambda n=number, t=takes_s: servers.score(n, t))
        return asyncio.get_running_loop().time()

    assert servers.busy_s <= 0.3 * run_virtual(unpaced()) + SAVED_S + 0.5
    assert servers.busy_s == pytest.approx(20), "the control breaks the bound"


def test_idle_servers_score_at_once():
    servers = Servers(sampling=0)

    async def scenario() -> float:
        paced = StudentShare(LiveVersion(), 0.01, servers.in_flight)
        await all_scores(servers, paced, [2.0] * 30)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 2


def test_scores_go_on_at_once_when_sampling_ends():
    servers = Servers(sampling=1)

    async def scenario() -> float:
        paced = StudentShare(LiveVersion(), 0.01, servers.in_flight)
        asked = asyncio.create_task(all_scores(servers, paced, [1.0, 1.0], [0.5, 0]))
        await asyncio.sleep(4)
        assert servers.order == [0], "100 s are owed for the first"
        servers.sampling = 0
        await asked
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(5, abs=0.2)


def test_an_answer_is_of_one_version():
    servers, live = Servers(sampling=1), LiveVersion()

    async def scenario() -> tuple[int, int]:
        paced = StudentShare(live, 0.5, servers.in_flight)
        asked = asyncio.create_task(paced.of_one_version(lambda: servers.score(7, 1.0)))
        await asyncio.sleep(0.5)
        live.changes()
        await asyncio.sleep(1)
        live.settle(4)
        return await asked

    assert run_virtual(scenario()) == (7, 4)
    assert servers.order == [7, 7], "the first answer was thrown away"


def test_one_that_fails_leaves_its_turn():
    servers = Servers(sampling=1)

    async def fails() -> int:
        raise BadReply("no scores")

    async def scenario() -> tuple[int, int]:
        paced = StudentShare(LiveVersion(), 0.5, servers.in_flight)
        with pytest.raises(BadReply, match="no scores"):
            await paced.of_one_version(fails)
        waits = asyncio.create_task(paced.of_one_version(lambda: servers.score(1, 9.0)))
        also = asyncio.create_task(paced.of_one_version(lambda: servers.score(2, 1.0)))
        await asyncio.sleep(1)
        also.cancel()
        await asyncio.gather(also, return_exceptions=True)
        return await paced.of_one_version(lambda: servers.score(3, 1.0)) and await waits

    assert run_virtual(scenario()) == (1, 0)
