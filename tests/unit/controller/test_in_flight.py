"""What a weight sync does with the rollouts in flight, one policy after the other."""

import asyncio
from typing import Any

import pytest

from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.records.types import Rollout, VersionSpan
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import make_prompt, make_rollout


class Serving:
    """Servers, of which none serves any more some time after that was asked."""

    def __init__(self, seconds: float = 1e9) -> None:
        self._seconds = seconds

    async def until_none_serves(self) -> None:
        await asyncio.sleep(self._seconds)


class Engine:
    """Samples for ten seconds; counts what began, ended and was cancelled."""

    def __init__(self) -> None:
        self.began = self.ended = self.cancelled = 0

    async def generate(self) -> Rollout:
        self.began += 1
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.ended += 1
        return make_rollout(make_prompt(0), (VersionSpan(0, 0, 4),))


async def synced(policy: Any, engine: Engine, serve_s: float = 1e9) -> tuple[float, Rollout]:
    """When a weight sync that comes after 4 s may begin, and what a rollout of then became."""
    clock = asyncio.get_running_loop().time
    rollouts = Rollouts(policy, Serving(serve_s))
    running = asyncio.create_task(rollouts.run(engine.generate))
    await asyncio.sleep(4)
    async with rollouts.held():
        began_s = clock()
        late = asyncio.create_task(rollouts.run(engine.generate))
        await asyncio.sleep(1)
        assert engine.began == (2 if policy == "in_place" else 1), "one began during the sync"
    await late
    return began_s, await running


@pytest.mark.parametrize(
    ("policy", "after_s", "cancelled", "restarts"),
    [("in_place", 4.0, 0, 0), ("keep", 10.0, 0, 0), ("abort", 4.0, 1, 1)],
)
def test_each_policy_does_what_it_says(policy, after_s: float, cancelled: int, restarts: int):
    engine = Engine()
    began_s, rollout = run_virtual(synced(policy, engine))
    assert began_s == pytest.approx(after_s)
    assert (engine.cancelled, rollout.restarts) == (cancelled, restarts)
    assert engine.ended == 2


def test_a_weight_sync_does_not_wait_for_servers_that_wait_for_it():
    began_s, _ = run_virtual(synced("keep", Engine(), serve_s=2.0))
    assert began_s == pytest.approx(6.0)


@pytest.mark.parametrize("policy", ["keep", "abort"])
def test_a_cancelled_rollout_ends_its_request(policy):
    async def scenario() -> None:
        engine = Engine()
        running = asyncio.create_task(Rollouts(policy, Serving()).run(engine.generate))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert engine.cancelled == 1

    run_virtual(scenario())


@pytest.mark.parametrize("policy", ["keep", "abort"])
def test_nothing_begins_between_two_weight_syncs_without_a_pause(policy):
    """Who waits for the first one's end is woken by it, and finds the second one under way."""

    async def scenario() -> None:
        engine = Engine()
        rollouts = Rollouts(policy, Serving())
        async with rollouts.held():
            late = asyncio.create_task(rollouts.run(engine.generate))
            await asyncio.sleep(1)
        async with rollouts.held():
            await asyncio.sleep(1)
            assert engine.began == 0, "one began during the second sync"
        assert len((await late).spans) == 1

    run_virtual(scenario())
