"""Snapshots of the real controller, and controllers that go on from them."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.buffer.permits import PermitError, Permits, staleness_versions
from megatron_opd.buffer.rejection import RolloutRejected, ScoreRejected
from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState, GroupMember, place
from megatron_opd.controller.snapshot_codec import (
    decode_member,
    decode_state,
    encode_member,
    encode_state,
)
from megatron_opd.errors import UserError
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.sample_figures import AlignedScores
from megatron_opd.records.types import Sample, TurnFigures
from megatron_opd.sim.clock import run_virtual
from megatron_opd.transport.samples import EncodedSample
from tests.support.fakes import (
    Fleet,
    Learner,
    Teacher,
    WeightSyncer,
    Witness,
    make_prompt,
    make_sample,
)
from tests.support.schedules import planned
from tests.support.trajectories import trajectory
from tests.support.wire import config


class Keeper:
    """Every update's state, as it would be written."""

    def __init__(self):
        self.kept = {}

    def due(self, updates):
        return True

    async def after_update(self, updates, state):
        self.kept[updates] = encode_state(await state())

    async def at_end(self, updates, state):
        self.last = encode_state(await state())


def go(schedule, state=NOTHING_YET, *, seed=0, bad=(), until_s=None):
    """A run from `state`: its accounting, learner and keeper. bad: uids that are dropped.

    until_s: when it is told to end early.
    """
    rng = np.random.default_rng(seed)
    pace = rng.exponential(1.0, 4096) + 0.01

    def lost(uid):
        return RolloutRejected("empty_response") if uid in bad and uid % 2 else None

    def unscored(uid):
        return ScoreRejected("nan") if uid in bad and uid % 2 == 0 else None

    fleet = Fleet(lambda uid: float(pace[uid]), lost, version=state.version)
    learner, keeper = Learner(lambda update: 0.5), Keeper()
    ports = Ports(
        map(make_prompt, count(state.next_uid)),
        fleet,
        Teacher(lambda uid: float(pace[-uid]), unscored),
        learner,
        WeightSyncer(fleet, learner),
        Witness(),
        keeper=keeper,
        passed=lambda: [[2, 5], [0]],
    )

    async def scenario():
        controller = Controller(schedule, ports, state)
        if until_s is not None:
            asyncio.get_running_loop().call_later(until_s, controller.end_early)
        return await controller.run()

    return run_virtual(scenario()), learner, keeper


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_run_goes_on_from_any_update_and_loses_nothing(data):
    group = data.draw(st.sampled_from([1, 2]))
    tau = data.draw(st.integers(0, 3))
    schedule = planned(
        updates=6,
        batch_size=group * data.draw(st.integers(1, 3)),
        max_staleness=tau,
        rollout_slots=data.draw(st.integers(1, 16)),
        score_slots=data.draw(st.integers(1, 16)),
        group_size=group,
        hold_batches=data.draw(st.integers(0, tau)),
    )
    bad = data.draw(st.sets(st.integers(0, 40), max_size=8))
    whole, first, keeper = go(schedule, seed=data.draw(st.integers(0, 99)), bad=bad)
    assert sorted(keeper.kept) == list(range(1, 7))
    at = data.draw(st.integers(1, 5))
    state = decode_state(keeper.kept[at])
    assert state.passed == [[2, 5], [0]]
    assert state.admitted == state.consumed + sum(state.dropped.values()) + len(state.line)
    assert len(state.line) <= (tau + 1) * schedule.batch_size
    done, second, _ = go(schedule, state, seed=data.draw(st.integers(0, 99)), bad=bad)

    assert (done.updates, done.version, done.in_flight) == (6, 6, 0)
    assert done.admitted == done.consumed + sum(done.dropped.values())
    assert done.consumed == whole.consumed == 6 * schedule.batch_size
    batches = [*first.batches[:at], *second.batches]
    assert [batch.update for batch in batches] == list(range(6))
    uids = [sample.rollout.prompt.uid for batch in batches for sample in batch.samples]
    assert uids == sorted(set(uids)), "each sample once, in admission order"
    for batch in batches:
        members = Counter(sample.rollout.prompt.uid // group for sample in batch.samples)
        assert set(members.values()) == {group}, "only whole groups"
        assert all(staleness_versions(s, batch.version) <= tau for s in batch.samples)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_run_that_is_told_to_end_goes_on_from_its_last_update(data):
    tau = data.draw(st.integers(0, 3))
    schedule = planned(6, 2, tau, 8, 8, hold_batches=data.draw(st.integers(0, tau)))
    until_s = data.draw(st.floats(0.0, 12.0))
    first_run, first, keeper = go(schedule, seed=1, until_s=until_s)
    state = decode_state(keeper.last) if hasattr(keeper, "last") else None
    if state is None:
        assert first_run.updates == 6, "it was over before"
        return
    # the update that was being made is part of it, and its version
    assert state.updates == state.version == first_run.updates == len(first.batches)
    assert state.admitted == state.consumed + len(state.line)
    done, second, _ = go(schedule, state, seed=2)
    assert (done.updates, done.version, done.in_flight) == (6, 6, 0)
    batches = [*first.batches, *second.batches]
    assert [batch.update for batch in batches] == list(range(6))
    uids = [sample.rollout.prompt.uid for batch in batches for sample in batch.samples]
    assert uids == list(range(12)), "each sample once, in admission order"
    assert all(staleness_versions(s, b.version) <= tau for b in batches for s in b.samples)


def test_a_run_that_made_all_its_updates_has_nothing_to_do():
    """One that was preempted in its last evaluation goes on from there."""
    _, _, keeper = go(planned(4, 2, 1, 8, 8))
    done, learner, _ = go(planned(4, 2, 1, 8, 8), decode_state(keeper.kept[4]))
    assert (done.updates, done.version, done.in_flight, learner.batches) == (4, 4, 0, [])


def test_held_samples_are_trained_on_as_they_were():
    schedule = planned(8, 2, 2, 16, 16, hold_batches=2)
    _, first, keeper = go(schedule, seed=1)
    _, second, _ = go(schedule, decode_state(keeper.kept[3]), seed=2)
    for ours, theirs in zip(second.batches[:2], first.batches[3:5], strict=True):
        assert (ours.update, ours.version) == (theirs.update, theirs.version)
        # also where the runs differ in everything that is sampled later
        assert [encode(s) for s in ours.samples] == [encode(s) for s in theirs.samples]
    times = [
        [s.rollout.finished_s for b in run.batches[-2:] for s in b.samples]
        for run in (first, second)
    ]
    assert times[0] != times[1]


def encode(sample):
    return encode_state(replace_line([place(sample)]))


def replace_line(line):
    return ControllerState(0, 0, len(line), 0, {}, 0, 100, line)


def test_every_stage_survives_the_bytes():
    sample = make_sample(5, version=3)
    teacher = np.array([-0.5, -np.inf, np.nan, 0, 1, 2, 3, 4], np.float32)
    sample = replace(sample, teacher_logp_N=teacher, reward=0.25)
    waits = replace(make_prompt(7), columns={"goal": {"n": [1, None, "é"]}})
    line = [place(sample), place(make_sample(6, version=3).rollout), place(waits)]
    back = decode_state(encode_state(replace_line(line)))
    scored, rolled, waiting = back.line
    assert [member.uid for member in back.line] == [5, 6, 7]
    assert scored.sample.reward == 0.25
    np.testing.assert_array_equal(scored.sample.teacher_logp_N, teacher)
    assert scored.sample.teacher_logp_N.dtype == np.float32
    for name in ("offsets_T1", "ids_N", "weight_N", "sampler_logp_N", "path_T"):
        ours, theirs = (getattr(r.draws, name) for r in (rolled.rollout, sample.rollout))
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert rolled.rollout.spans == sample.rollout.spans
    assert waiting.prompt.text == "p7"
    assert waiting.prompt.columns == waits.columns
    assert rolled.rollout.experts_XLk is None


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routed_experts_survive_the_bytes(dtype: type):
    experts = np.arange(6 * 3 * 2, dtype=dtype).reshape(6, 3, 2)
    rollout = replace(make_sample(5).rollout, experts_XLk=experts)
    (member,) = decode_state(encode_state(replace_line([place(rollout)]))).line
    back = member.rollout.experts_XLk
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, experts)


def test_gate_weights_survive_the_bytes():
    experts = np.arange(6 * 3 * 2, dtype=np.uint8).reshape(6, 3, 2)
    gates = (experts / 7).astype(np.float32)
    rollout = replace(make_sample(5).rollout, experts_XLk=experts, gates_XLk=gates)
    (member,) = decode_state(encode_state(replace_line([place(rollout)]))).line
    back = member.rollout.gates_XLk
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, gates)
    for changes in (
        {"gates_XLk": gates[:, :2]},
        {"gates_XLk": gates.astype(np.float64)},
        {"experts_XLk": None},
    ):
        odd = encode_state(replace_line([place(replace(rollout, **changes))]))
        with pytest.raises(ValueError, match="its gate weights are not those of its routed"):
            decode_state(odd)


def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match="not a controller's state"):
        decode_state(b"nothing")
    with pytest.raises(ValueError, match="not a controller's state"):
        decode_state(encode_state(NOTHING_YET)[:-3])
    other = encode_state(NOTHING_YET).replace(b"\xa6format\x02", b"\xa6format\x09")
    with pytest.raises(ValueError, match="must have format 2, got 9"):
        decode_state(other)
    line = [{"rollout": {"response_ids_T": b""}}]  # as format 1 had it
    with pytest.raises(ValueError, match="must have format 2, got 1"):
        decode_state(msgspec.msgpack.encode({"line": line, "format": 1}))


def test_scores_of_another_tokenizer_are_kept():
    own = AlignedScores(np.array([1, 0, 1], np.uint8), np.array([-0.5, -2], np.float32), True)
    sample = replace(make_sample(3, 0, 3), aligned=own)
    found = decode_member(encode_member(place(sample))).sample
    assert found is not None
    assert found.aligned is not None
    assert found.chunked
    assert found.aligned.scored_T.tolist() == [1, 0, 1]
    assert found.scores(9) == sample.scores(9)
    short = replace(own, scored_T=own.scored_T[1:])
    with pytest.raises(ValueError, match="2 marks of scores for 3 tokens"):
        decode_member(encode_member(place(replace(sample, aligned=short))))


def test_a_trajectory_is_kept_whole():
    """Its sequences, runs, turns, reward and the conversation that its environment goes on with."""
    sample = trajectory(4, [[(2, 3), (1, 2)], [(3, 1)]], routed=True, reward=0.5)
    messages = ({"role": "user", "content": "2+2=", "name": "a"},)
    own = np.array([5, 400], np.int32)
    prompt = replace(sample.rollout.prompt, messages=messages, tools=({"type": "function"},))
    prompt = replace(prompt, teacher_ids_Q=own)
    turns = (TurnFigures(1.0, 0.5, 2, 1, 7, 0.25), TurnFigures(2.0, 0.0))
    rollout = replace(sample.rollout, prompt=prompt, turns=turns, reward=0.25)
    found = decode_member(encode_member(place(replace(sample, rollout=rollout)))).sample
    assert found is not None
    assert found.rollout.runs == rollout.runs
    assert found.rollout.turns == turns
    assert (found.rollout.reward, found.reward) == (0.25, 0.5)
    assert found.rollout.prompt.messages == messages
    np.testing.assert_array_equal(found.rollout.prompt.teacher_ids_Q, own)
    assert found.rollout.prompt.tools == ({"type": "function"},)
    for ours, theirs in zip(found.rollout.sequences, rollout.sequences, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == np.int32
    np.testing.assert_array_equal(found.rollout.gates_XLk, rollout.gates_XLk)


def test_more_holders_than_permits_are_a_broken_state():
    with pytest.raises(PermitError, match="3 prompts hold permits, there are 2"):
        Permits(2, [1, 2, 3])
    assert GroupMember(prompt=make_prompt(4)).uid == 4


def broken(**changes):
    sample = make_sample(5, version=3)
    rollout = replace(sample.rollout, **changes.pop("rollout", {}))
    line = [place(replace(sample, rollout=rollout, **changes.pop("sample", {})))]
    return replace_line(line), changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"admitted": 3}, "3 prompts were admitted, 1 are accounted for"),
        ({"consumed": -1, "admitted": 0}, "a count is below 0"),
        ({"next_uid": 5}, "the line is not in order of admission"),
        ({"passed": [[], [3, 2]]}, "the rows passed over are not in order"),
        ({"passed": [[-1]]}, "the rows passed over are not in order"),
        ({"line": [GroupMember()]}, "it must hold one of prompt, rollout and sample"),
        ({"sample": {"teacher_logp_N": np.zeros(3, np.float32)}}, "3 scores for 8 ids"),
        (
            {"rollout": {"runs": (SampledRun(0, 4, 7),)}},
            "does not cover its 3 sampled tokens",
        ),
        ({"rollout": {"spans": ()}}, "its version spans do not cover its sampled tokens"),
    ],
)
def test_a_state_that_cannot_have_been_is_refused(changes: dict, words: str):
    """Before: each was gone on from."""
    state, rest = broken(**changes)
    fields = {name: getattr(state, name) for name in state.__struct_fields__}
    with pytest.raises(ValueError, match=f"not a controller's state: .*{words}"):
        decode_state(encode_state(ControllerState(**fields | rest)))


def test_a_state_nested_without_end_is_refused():
    """Before: RecursionError."""
    deep = encode_state(replace_line([place(make_prompt(7))]))
    nested = b"\x91\x81\xa1a" + b"\x91" * 5000 + b"\x90"
    assert b"\xa8messages\x90" in deep
    deep = deep.replace(b"\xa8messages\x90", b"\xa8messages" + nested)
    with pytest.raises(ValueError, match="not a controller's state"):
        decode_state(deep)


@pytest.mark.parametrize("row", ['{"update": 1.0}', '{"update": -1}', '{"update": true}', "x"])
def test_rows_that_are_none_end_a_resumption(tmp_path: Path, row: str):
    """Before: the first three were kept."""
    (tmp_path / "metrics.jsonl").write_text(f'{{"update": 0}}\n{row}\n{{"upd')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is damaged"):
        RunDir(tmp_path).continue_from(config(), 3)


def test_a_checkpoint_holds_no_frames():
    """They are made again from the rest: a checkpoint would hold every number twice."""
    sample = replace(make_sample(3), reward=0.5)
    kept = place(EncodedSample.of(sample, 0)).sample
    assert type(kept) is Sample
    assert kept.rollout is sample.rollout
    assert kept.teacher_logp_N is sample.teacher_logp_N
    assert kept.reward == 0.5
