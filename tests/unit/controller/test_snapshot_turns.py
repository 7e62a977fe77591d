"""A controller's state has the finished turns of trajectories that are under way."""

import asyncio
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.snapshot import (
    NOTHING_YET,
    ControllerState,
    GroupMember,
    StartedTrajectory,
    place,
)
from megatron_opd.controller.snapshot_codec import (
    decode_member,
    decode_state,
    encode_member,
    encode_state,
)
from megatron_opd.inputs.prompt_order import _without_row
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.records.turns import SampledTurn
from megatron_opd.records.types import NO_ROW, Sample
from megatron_opd.rollout.resumed import ResumeCounts, ResumedTrajectories
from megatron_opd.sim.clock import run_virtual
from tests.support.config_files import minimal
from tests.support.fakes import Learner, Teacher, WeightSyncer, Witness, make_prompt
from tests.support.playing import SeededServers, trajectories
from tests.support.schedules import planned

SCHEDULE = planned(6, 2, 2, 1000, 8)
AT = 1


class Keeper:
    """The state after one update."""

    kept = b""

    def due(self, updates: int) -> bool:
        return updates == AT

    async def after_update(self, updates: int, state: Any) -> None:
        self.kept = encode_state(await state())

    async def at_end(self, updates: int, state: Any) -> None: ...


def go(state: ControllerState = NOTHING_YET) -> tuple[list[Sample], SeededServers, Keeper]:
    """What a run from `state` trains on, its servers and its keeper."""
    servers, learner, keeper = SeededServers(state.version), Learner(), Keeper()
    engine = ResumedTrajectories(trajectories(servers), ResumeCounts())
    ports = Ports(
        map(make_prompt, count(state.next_uid)),
        engine,
        Teacher(),
        learner,
        WeightSyncer(servers, learner),  # type: ignore[arg-type]
        Witness(),
        keeper=keeper,
        turns=engine,
    )

    async def scenario() -> None:
        done = await Controller(SCHEDULE, ports, state).run()
        assert done.admitted == done.consumed == 12
        assert done.in_flight == 0

    run_virtual(scenario())
    return [s for batch in learner.batches for s in batch.samples], servers, keeper  # type: ignore


def test_a_run_goes_on_within_its_trajectories():
    whole, _, keeper = go()
    state = decode_state(keeper.kept)
    begun = [member for member in state.line if member.turns]
    assert begun, "some are between two turns"
    second, servers, _ = go(state)
    for ours, theirs in zip(second, whole[AT * 2 :], strict=True):
        assert ours.rollout.prompt.uid == theirs.rollout.prompt.uid
        for mine, other in zip(ours.rollout.sequences, theirs.rollout.sequences, strict=True):
            assert np.array_equal(mine, other)
    seed = minimal().run.seed
    kept = {
        derived_seed(seed, ROLLOUT, member.uid, *([turn] if turn else []))
        for member in begun
        for turn in range(len(member.turns))
    }
    asked = [request.seed for request in servers.requests]
    assert kept.isdisjoint(asked), "no finished turn is sampled again"
    assert len(asked) == len(set(asked)) == 4 * (12 - 2 * AT - finished(state)) - len(kept)


def finished(state: ControllerState) -> int:
    """How many of the line were whole."""
    return sum(member.prompt is None for member in state.line)


def one_turn() -> SampledTurn:
    async def run() -> SampledTurn:
        made = trajectories(SeededServers())
        task = asyncio.create_task(made.generate(make_prompt(5)))
        await asyncio.sleep(3)
        (turn,) = made.under_way(5)
        await task
        return turn

    return run_virtual(run())


TURN = one_turn()


def broken(**changes: Any) -> SampledTurn:
    return replace(TURN, reply=replace(TURN.reply, **changes))


def test_a_turn_survives_the_bytes_and_another_order_of_the_prompts():
    member = decode_member(encode_member(place(StartedTrajectory(make_prompt(5), [TURN]))))
    (turn,) = _without_row(member).turns
    assert _without_row(member).asked.row == NO_ROW
    assert (turn.start, turn.follows, turn.sampling_s) == (TURN.start, TURN.follows, 2.0)
    assert turn.reply.spans == TURN.reply.spans
    for name in ("output_ids_T", "experts_XLk", "gates_XLk"):
        mine, other = getattr(turn.reply, name), getattr(TURN.reply, name)
        assert np.array_equal(mine, other), name
        assert mine.dtype == other.dtype


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (broken(draws=None), "it has no draws"),
        (broken(cached_tokens=-1), "a count below 0"),
        (broken(spans=()), "its version spans do not cover"),
        (broken(output_ids_T=TURN.reply.output_ids_T[:-1]), "its cache does not cover"),
        (broken(output_ids_T=TURN.reply.output_ids_T + 1), "its cache is of other tokens"),
        (broken(experts_XLk=TURN.reply.experts_XLk[1:]), "routed experts for"),  # type: ignore[index]
        (replace(TURN, start=0), "nothing before it"),
        (replace(TURN, sampling_s=float("nan")), "it was sampled in nan s"),
    ],
)
def test_a_turn_that_cannot_have_been_is_refused(turn: SampledTurn, words: str):
    member = GroupMember(prompt=make_prompt(5), turns=(turn,))
    with pytest.raises(ValueError, match=f"not a place of the line: turn 1: .*{words}"):
        decode_member(encode_member(member))


def test_turns_of_what_is_whole_are_refused():
    rollout = trajectories_rollout()
    with pytest.raises(ValueError, match="turn 1: of what is no prompt"):
        decode_member(encode_member(GroupMember(rollout=rollout, turns=(TURN,))))


def trajectories_rollout() -> Any:
    return run_virtual(trajectories(SeededServers()).generate(make_prompt(5)))
