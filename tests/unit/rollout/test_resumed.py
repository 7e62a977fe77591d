"""A trajectory that was interrupted goes on from its turns, or begins anew and is counted."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.controller.snapshot import StartedTrajectory, place
from megatron_opd.controller.snapshot_codec import decode_member, encode_member
from megatron_opd.environments.failed import HostLost
from megatron_opd.environments.protocol import TrajectoryEnd
from megatron_opd.records.drops import ENVIRONMENT_DIED, ENVIRONMENT_FAILED
from megatron_opd.records.turns import SampledTurn
from megatron_opd.records.types import Rollout
from megatron_opd.rollout.resumed import ResumeCounts, ResumedTrajectories
from megatron_opd.rollout.trajectories import MOST_HOSTS
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import make_prompt
from tests.support.playing import (
    SAMPLING_S,
    Echoing,
    InProcessHost,
    SeededServers,
    everything,
    trajectories,
)

PROMPT = make_prompt(5)


def turns_after(done: int) -> tuple[SampledTurn, ...]:
    """The turns of a trajectory that is interrupted while it samples the one after them."""

    async def interrupted() -> tuple[SampledTurn, ...]:
        engine = ResumedTrajectories(trajectories(SeededServers()), ResumeCounts())
        task = asyncio.create_task(engine.generate(PROMPT))
        await asyncio.sleep(SAMPLING_S * (done + 0.5))
        found = engine.turns_of(PROMPT.uid)
        await asyncio.sleep(10 * SAMPLING_S)  # what comes after the call changes nothing
        member = encode_member(place(StartedTrajectory(PROMPT, await found)))
        await task
        assert await engine.turns_of(PROMPT.uid) == (), "it is whole"
        return decode_member(member).turns

    return run_virtual(interrupted())


def gone_on(
    kept: tuple[SampledTurn, ...], servers: SeededServers, kind: type[Any] = Echoing
) -> tuple[Rollout, ResumeCounts]:
    async def run() -> tuple[Rollout, ResumeCounts]:
        counts = ResumeCounts()
        engine = ResumedTrajectories(trajectories(servers, kind), counts)
        if kept:
            engine.restore(PROMPT.uid, kept)
            assert await engine.turns_of(PROMPT.uid) == kept, "a checkpoint before it begins"
        rollout = await engine.generate(PROMPT)
        assert isinstance(rollout, Rollout)
        return rollout, counts

    return run_virtual(run())


UNBROKEN, _ = gone_on((), SeededServers())


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_it_goes_on_from_its_turns_and_is_bitwise_what_it_would_have_been(done: int):
    kept = turns_after(done)
    assert len(kept) == done
    servers = SeededServers()
    rollout, counts = gone_on(kept, servers)
    assert everything(rollout) == everything(UNBROKEN)
    assert len(servers.requests) == Echoing.turns - done, "what was sampled is not sampled again"
    assert counts == ResumeCounts(resumed=int(done > 0))
    assert [turn.sampling_s for turn in rollout.turns] == [SAMPLING_S] * Echoing.turns


def test_every_turn_keeps_the_version_that_sampled_it():
    rollout, _ = gone_on(turns_after(2), SeededServers(version=3))
    edge = sum(run.num_tokens for run in rollout.runs[:2])
    assert [(span.version, span.start) for span in rollout.spans] == [(0, 0), (3, edge)]
    assert rollout.oldest_version == 0
    assert place(StartedTrajectory(PROMPT, turns_after(2))).oldest_version(live=3) == 0
    assert place(StartedTrajectory(PROMPT, ())).oldest_version(live=3) == 3


class Changing(Echoing):
    """Says something else each time it is made."""

    made = 0

    async def step(self, reply: Any) -> Any:
        said = await super().step(reply)
        if isinstance(said, TrajectoryEnd):
            return said
        type(self).made += 1
        return f"{said.messages} for the {self.made}th time"


class Shorter(Echoing):
    turns = 1


class Broken(Echoing):
    """Cannot be brought to its second turn a second time."""

    alive = 0

    async def start(self, row: Any) -> str:
        type(self).alive += 1
        return await super().start(row)

    async def step(self, reply: Any) -> Any:
        if self.alive == 1 and self._turns == 1:
            raise ConnectionError("its state is gone")
        return await super().step(reply)


@pytest.mark.parametrize(
    ("kind", "turns", "why"),
    [
        (Changing, 4, "it said something else before turn 2"),
        (Shorter, 1, "it ended after 1 of 2 turns"),
        (Broken, 4, "environment_failed: step: ConnectionError: its state is gone"),
    ],
)
def test_one_that_cannot_be_brought_back_begins_anew_and_is_counted(
    kind: type[Any], turns: int, why: str, caplog: pytest.LogCaptureFixture
):
    servers = SeededServers()
    rollout, counts = gone_on(turns_after(2), servers, kind)
    assert counts == ResumeCounts(resumed=1, begun_anew=1)
    assert len(servers.requests) == len(rollout.runs) == turns, "nothing is left of the kept turns"
    (line,) = caplog.messages
    assert line == (
        f"prompt 5: its environment does not go on after 2 turns ({why}); it begins anew"
    )
    # the same random numbers: its first turn is that of the one which was interrupted
    run = rollout.runs[0]
    assert np.array_equal(
        rollout.sequences[0][: run.stop], UNBROKEN.sequences[0][: UNBROKEN.runs[0].stop]
    )


def test_a_failure_after_the_kept_turns_drops_the_trajectory():
    class Failing(Echoing):
        async def step(self, reply: Any) -> Any:
            if self._turns == 2:
                raise RuntimeError("spoilt")
            return await super().step(reply)

    servers = SeededServers()
    with pytest.raises(RolloutRejected) as rejected:
        gone_on(turns_after(2), servers, Failing)
    assert rejected.value.reason == ENVIRONMENT_FAILED
    assert len(servers.requests) == 1, "it is not begun anew"


class HostKilled(InProcessHost):
    """Loses its first `losses` hosts, each after its environment was given `turns` turns."""

    def __init__(self, kind: type[Any], losses: int, turns: int) -> None:
        super().__init__(kind)
        self.losses, self._turns = losses, turns

    @asynccontextmanager
    async def environment(self):
        async with super().environment() as partner:
            step, given = partner.step, 0

            async def lost(reply: Any) -> Any:
                nonlocal given
                given += 1
                if self.losses and given > self._turns:
                    self.losses -= 1
                    raise HostLost(ENVIRONMENT_DIED, "its host was killed")
                return await step(reply)

            partner.step = lost
            yield partner


def played_on(
    servers: SeededServers, losses: int, turns: int, kind: type[Any] = Echoing
) -> tuple[Rollout, HostKilled]:
    engine = trajectories(servers, kind)
    host = HostKilled(kind, losses, turns)
    engine._playing = replace(engine._playing, host=host)  # type: ignore[attr-defined]
    rollout = run_virtual(engine.generate(PROMPT))
    assert isinstance(rollout, Rollout)
    return rollout, host


@pytest.mark.parametrize("losses", [1, MOST_HOSTS - 1])
@pytest.mark.parametrize("turns", [0, 2, 3])
def test_a_trajectory_whose_host_is_lost_goes_on_and_is_bitwise_the_same(losses: int, turns: int):
    servers = SeededServers()
    rollout, host = played_on(servers, losses, turns)
    assert host.losses == 0
    assert everything(rollout) == everything(UNBROKEN)
    assert len(servers.requests) == Echoing.turns, "what was sampled is not sampled again"


def test_one_that_loses_every_host_is_dropped():
    with pytest.raises(RolloutRejected) as rejected:
        played_on(SeededServers(), MOST_HOSTS, 1)
    assert rejected.value.reason == ENVIRONMENT_DIED


def test_one_that_cannot_be_brought_to_another_host_begins_anew(caplog: pytest.LogCaptureFixture):
    servers = SeededServers()
    rollout, _ = played_on(servers, 1, 2, Changing)
    assert len(servers.requests) == 3 + len(rollout.runs)
    (line,) = caplog.messages
    assert line.startswith("prompt 5: its host was lost, its environment does not go on (it")
