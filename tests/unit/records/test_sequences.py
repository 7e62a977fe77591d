"""Trajectories are cut into sequences and joined again without losing or moving a token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.records.runs import SampledRun, runs_fault
from megatron_opd.records.sequences import by_sequence, inputs_of, joined, single_turn
from megatron_opd.records.types import Rollout, Sample, SequenceSize
from sglang_bridge.columns import arrays_of
from sglang_bridge.protocol import DrawCache
from tests.support.fakes import make_prompt
from tests.support.trajectories import Layout, layouts, trajectory


def same(ours: Sample, theirs: Sample) -> bool:
    """Whether every array and figure of two samples is equal."""

    def arrays(sample: Sample) -> list[np.ndarray | None]:
        rollout = sample.rollout
        cached = arrays_of(rollout.draws, DrawCache).values()
        routing = rollout.experts_XLk, rollout.gates_XLk
        return [*rollout.sequences, *cached, sample.teacher_logp_N, rollout.versions_T(), *routing]

    pairs = zip(arrays(ours), arrays(theirs), strict=True)
    return ours.rollout.runs == theirs.rollout.runs and all(
        a is b is None or (a.dtype == b.dtype and np.array_equal(a, b)) for a, b in pairs
    )


@settings(max_examples=60, deadline=None)
@given(layouts, st.booleans())
def test_a_trajectory_is_its_sequences_end_to_end(layout: Layout, routed: bool):
    sample = trajectory(5, layout, routed=routed)
    parts = by_sequence(sample)
    assert same(joined(parts), sample)
    assert [part.rollout.sizes[0] for part in parts] == list(sample.rollout.sizes)
    means = sample.rollout.geometric_logps
    assert tuple(part.rollout.geometric_logps[0] for part in parts) == means
    inputs = [inputs_of(part.rollout) for part in parts]
    trained = np.concatenate([own.ids_S[own.position_T] for own in inputs])
    assert trained.tolist() == sample.rollout.response_ids_T.tolist()
    draws = sample.rollout.draws
    assert draws.ids_N[draws.path_T].tolist() == trained.tolist(), "the path is what was sampled"
    for part, ids_S in zip(parts, sample.rollout.sequences, strict=True):
        assert part.rollout.sequences == (ids_S,)
        assert runs_fault([len(ids_S)], part.rollout.runs) is None
        assert part.rollout.spans[-1].stop == part.rollout.num_response_tokens
        assert same(by_sequence(part)[0], part)


def test_a_sample_of_one_sequence_is_not_cut():
    sample = trajectory(1, [[(2, 3), (1, 2)]])
    assert by_sequence(sample)[0] is sample
    assert joined([sample]) is sample


def test_the_sizes_of_sequences():
    rollout = trajectory(1, [[(2, 3), (4, 2)], [(1, 1)]]).rollout
    cached = np.diff(rollout.draws.offsets_T1)
    first, second = int(cached[:5].sum()), int(cached[5:].sum())
    assert rollout.sizes == (SequenceSize(11, 5, first), SequenceSize(2, 1, second))
    assert (rollout.num_tokens, rollout.num_response_tokens) == (13, 6)


def test_one_turn_is_a_prompt_and_a_response_behind_it():
    prompt, draws = make_prompt(3, num_tokens=2), trajectory(1, [[(2, 3)]]).rollout.draws
    rollout = single_turn(prompt, np.array([7, 8, 9], np.int32), draws, ())
    assert isinstance(rollout, Rollout)
    assert rollout.sequences[0].tolist() == [*prompt.token_ids_P.tolist(), 7, 8, 9]
    assert rollout.runs == (SampledRun(0, 2, 5),)
    assert rollout.response_ids_T.tolist() == [7, 8, 9]


def test_routing_of_some_sequences_alone_is_refused():
    routed, plain = (trajectory(1, [[(1, 2)]], routed=routed) for routed in (True, False))
    with pytest.raises(ValueError, match="must all carry routing of one model, or none"):
        joined([routed, plain])


@pytest.mark.parametrize(
    ("lengths", "runs", "fault"),
    [
        ([5], [], "each of 1 sequences must have a run"),
        ([], [], "at least one sequence"),
        ([5], [(0, 0, 5)], "a run of ids 0..5 of 5"),
        ([5], [(0, 3, 3), (0, 4, 5)], "a run of ids 3..3 of 5"),
        ([5], [(0, 3, 6)], "a run of ids 3..6 of 5"),
        ([5], [(0, 1, 3), (0, 2, 5)], "runs overlap at id 2"),
        ([5], [(0, 3, 5), (0, 1, 2)], "runs overlap at id 1"),
        ([5], [(0, 1, 4)], "sequence 0 of 5 ids must end with a sampled one"),
        ([5, 5], [(0, 1, 5)], "each of 2 sequences must have a run"),
        ([5, 5], [(1, 1, 5), (0, 1, 5)], "listed sequence by sequence"),
        ([5], [(0, 1, 5), (1, 1, 5)], "each of 1 sequences must have a run, and no other"),
        ([5], [(0, 1, 5, -1)], "turn -1"),
    ],
)
def test_runs_that_cannot_be_are_named(lengths, runs, fault: str):
    assert (
        runs_fault([5, 4], [SampledRun(0, 1, 2), SampledRun(0, 2, 5), SampledRun(1, 3, 4)]) is None
    )
    assert fault in str(runs_fault(lengths, [SampledRun(*run) for run in runs]))
