"""Columns of a batch and its plan are checked before they are trained on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.batching.advantages import no_groups
from megatron_opd.batching.checks import check_batch
from megatron_opd.batching.shares import Share, sequences_of
from megatron_opd.records.columns import COLUMNS, RankBatch
from megatron_opd.transport.frames import from_frames, to_frames
from tests.support.batches import make_batch
from tests.support.wire import safe

PLAN = [[[0, 1, 2]]]
SHARE = Share(3, 4, PLAN, tuple(sequences_of(make_batch(3).samples)), no_groups(3))
BATCH = SHARE.columns()


def checked(batch: RankBatch, sampled: bool = True) -> None:
    check_batch(batch, vocab_size=512, num_experts=4, sampled=sampled)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_columns_are_refused_with_one_error(data: st.DataObject):
    frames = [bytearray(frame) for frame in to_frames(SHARE)]
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, len(frames) - 1))
        frame, how = frames[which], data.draw(st.sampled_from(["cut", "flip", "grow", "swap"]))
        if how == "cut":
            del frame[data.draw(st.integers(0, max(0, len(frame) - 1))) :]
        elif how == "flip" and frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
        elif how == "grow":
            frame += data.draw(st.binary(max_size=64))
        else:
            other = data.draw(st.integers(0, len(frames) - 1))
            frames[which], frames[other] = frames[other], frames[which]
    if data.draw(st.booleans()):
        frames.pop()
    try:
        batch = from_frames(3, 4, PLAN, [memoryview(frame) for frame in frames])
        check_batch(batch, vocab_size=512, num_experts=4, sampled=True)
    except ValueError as error:
        safe(error)
        return
    assert (np.diff(np.cumsum(batch.count_T)) > 0).all()
    assert 0 <= batch.ids_N.min() <= batch.ids_N.max() < 512
    assert np.isfinite(batch.sampler_logp_N).all()


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("ids_S", 512, "column ids_S must be in 0..511, got"),
        ("ids_N", -1, "column ids_N must be in 0..511, got -1"),
        ("count_T", 0, "must"),
        ("path_T", 0, "column path_T must point into its own row"),
        ("version_T", 5, "column version_T must be in 0..4, got"),
        ("weight_N", -0.5, "column weight_N must be >= 0"),
        ("reward_weight_B", -0.5, "column reward_weight_B must be >= 0"),
        ("teacher_weight_B", -0.5, "column teacher_weight_B must be >= 0"),
        ("weight_N", np.nan, "column weight_N must be finite"),
        ("sampler_logp_N", np.nan, "column sampler_logp_N must be finite"),
        ("advantage_B", np.inf, "column advantage_B must be finite"),
        ("turn_advantage_T", np.nan, "column turn_advantage_T must be finite"),
        ("response_B", -1, "must"),
    ],
)
def test_each_column_is_checked(column: str, value: float, words: str):
    batch = replace(BATCH, turn_advantage_T=np.zeros(len(BATCH.path_T)))
    checked(batch)
    values = getattr(batch, column).copy()
    values[-1] = value
    with pytest.raises(ValueError, match=words):
        checked(replace(batch, **{column: values}))
    if column == "sampler_logp_N":  # the teacher chose the ids: only the path's is known
        values[-1], unread = 0.0, sorted(set(range(len(values))) - set(BATCH.path_T.tolist()))
        values[unread] = np.nan
        checked(replace(BATCH, **{column: values}), sampled=False)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.nan, "column gates_XLk must be finite, value 3 is not"),
        (np.inf, "column gates_XLk must be finite"),
        (-0.5, "column gates_XLk must be >= 0, got -0.5"),
    ],
)
def test_gate_weights_are_checked(value: float, words: str):
    inputs = len(BATCH.ids_S) - len(BATCH.length_B)
    experts = np.zeros((inputs, 2, 1), np.uint8)
    gates = np.full(experts.shape, 0.5, np.float32)
    checked(replace(BATCH, experts_XLk=experts, gates_XLk=gates))
    gates[1, 1] = value
    with pytest.raises(ValueError, match=words) as refused:
        checked(replace(BATCH, experts_XLk=experts, gates_XLk=gates))
    safe(refused.value)


MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        # two of the largest numbers and 2 more are 0 in 64 bits: the sum stays right
        ("length_B", lambda v: [MOST, MOST, v.sum() + 2], "length_B must be in 1.."),
        ("length_B", lambda v: [v[0] + 1, *v[1:]], "length_B and response_B must add up to"),
        ("response_B", lambda v: [v[0] + 1, *v[1:]], "length_B and response_B must add up to"),
        ("position_T", lambda v: [0, *v[1:]], "must rise inside a sequence, from 1 on, token 0"),
        ("position_T", lambda v: [v[0], v[0], *v[2:]], "from 1 on, token 1 does not"),
        ("position_T", lambda v: [v[0], *v[1:] + 1], "column position_T must rise"),
        ("response_B", lambda v: [MOST, MOST, v.sum() + 2], "response_B must be in 1.."),
        ("count_T", lambda v: [MOST, MOST, v[:3].sum() + 2, *v[3:]], "count_T must be in 1.."),
        ("ids_S", lambda v: [*v[:-1], v[-1] + 1], "path_T must point to the sampled ids"),
        ("ids_N", lambda v: [v[0], v[0], *v[2:]], "ids_N must rise inside a row, value 1"),
    ],
)
def test_columns_are_checked_against_each_other(column, change, words: str):
    """Before: each of them was trained on."""
    values = np.array(change(getattr(BATCH, column)), dtype=COLUMNS[column])
    with pytest.raises(ValueError, match=words):
        checked(replace(BATCH, **{column: values}))


@pytest.mark.parametrize("plan", [[[[], [0, 1, 2]]], [[[0, 1, 2]], []], [[[0, 1, 2]], [[]]]])
def test_a_mini_batch_begins_with_samples(plan: list):
    whole = {"vocab_size": 512, "num_experts": 0, "sampled": True}
    with pytest.raises(ValueError, match="begin each mini-batch with a micro-batch of sequences"):
        check_batch(replace(BATCH, plan=plan), **whole)
    check_batch(replace(BATCH, plan=[[[0, 1, 2], []]]), **whole)


def test_a_plan_names_every_sample_once():
    for plan in ([[[0, 1]]], [[[0, 1, 2, 2]]], [[[0, 1, 3]]], [[[-1, 0, 1]]]):
        with pytest.raises(ValueError, match="plan must name each of 3 sequences once"):
            check_batch(
                replace(BATCH, plan=plan),
                vocab_size=512,
                num_experts=0,
                sampled=True,
            )
