"""Arrays that a data worker sends are those that it told of."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_opd.controller.snapshot import GroupMember, place
from megatron_opd.data_workers.fetched import fetched_fault
from megatron_opd.records.types import HeldSample, Sample, SequenceSize
from tests.support.fakes import held_rollout, make_prompt, make_sample

SAMPLE = make_sample(0, version=3)
ROLLOUT = SAMPLE.rollout
SHAPE = SAMPLE.scores(600)
assert SHAPE is not None
HELD = held_rollout(ROLLOUT, "r-1", SAMPLE.cache)


NAN = float("nan")


def test_the_arrays_that_were_told_of_have_no_fault():
    assert fetched_fault(HELD, place(ROLLOUT)) is None
    assert fetched_fault(HELD, place(SAMPLE)) is None, "it was scored since"
    assert fetched_fault(HeldSample(HELD, None), place(ROLLOUT)) is None
    assert fetched_fault(HeldSample(HELD, SHAPE), place(SAMPLE)) is None


def other(**changes: Any) -> Sample:
    """The sample with another draw cache."""
    return replace(SAMPLE, rollout=replace(ROLLOUT, draws=replace(ROLLOUT.draws, **changes)))


def with_first(column: Any, value: float) -> Any:
    """A column with another first number."""
    changed = column.copy()
    changed[0] = value
    return changed


DRAWS = ROLLOUT.draws


@pytest.mark.parametrize(
    "member",
    [
        place(make_prompt(0)),
        place(ROLLOUT),  # its scores are told of
        place(make_sample(0, version=2)),
        place(make_sample(0, version=3, num_tokens=3)),
        place(replace(SAMPLE, rollout=replace(ROLLOUT, finish_reason="length"))),
        place(replace(SAMPLE, rollout=replace(ROLLOUT, sequences=(ROLLOUT.sequences[0] + 1,)))),
        place(replace(SAMPLE, teacher_logp_N=with_first(SAMPLE.teacher_logp_N, NAN))),
        place(replace(SAMPLE, teacher_logp_N=with_first(SAMPLE.teacher_logp_N, -0.8))),
        place(other(ids_N=with_first(DRAWS.ids_N, 3))),
        place(other(ids_N=with_first(DRAWS.ids_N, -4))),
        place(other(weight_N=with_first(DRAWS.weight_N, NAN))),
        place(other(weight_N=with_first(DRAWS.weight_N, -1.0))),
        place(other(sampler_logp_N=with_first(DRAWS.sampler_logp_N, -0.6))),
    ],
    ids=range(13),
)
def test_arrays_that_are_not_those_it_told_of(member: GroupMember):
    fault = fetched_fault(HeldSample(HELD, SHAPE), member)
    assert fault is not None
    assert fault.isprintable()


def test_scores_where_no_teacher_was_asked_and_more_ids_than_were_told_of():
    assert fetched_fault(HeldSample(HELD, None), place(SAMPLE)) is not None
    assert (
        fetched_fault(msgspec.structs.replace(HELD, sizes=(SequenceSize(7, 4, 7),)), place(ROLLOUT))
        is not None
    )
    assert np.isfinite(SAMPLE.teacher_logp_N).all()
