"""Properties of the batch plan."""

from collections.abc import Iterable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.batching.plan import learner_plan, plan_batch
from megatron_opd.config.learner import LearnerConfig


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[int]], int, int, int]:
    """Samples of one to three sequences."""
    minis, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    count = minis * draw(st.integers(ranks, 8 * ranks))
    sample = st.lists(st.integers(1, 300), min_size=1, max_size=draw(st.sampled_from([1, 3])))
    lengths = draw(st.lists(sample, min_size=count, max_size=count))
    return lengths, minis, ranks, draw(st.integers(1, 600))


def alone(lengths: Iterable[int]) -> list[list[int]]:
    """Samples of one sequence each."""
    return [[length] for length in lengths]


@given(problems(), st.booleans())
def test_plan_invariants(problem: tuple[list[list[int]], int, int, int], lockstep: bool):
    samples, minis, ranks, budget = problem
    plan = plan_batch(samples, minis, ranks, budget, lockstep=lockstep)
    assert len(plan) == minis
    per_mini = len(samples) // minis
    lengths = [length for own in samples for length in own]
    starts = [0, *accumulate(len(own) for own in samples)]
    for index, mini in enumerate(plan):
        assert len(mini) == ranks
        held = sorted(i for rank in mini for micro in rank for i in micro)
        first, last = starts[index * per_mini], starts[(index + 1) * per_mini]
        assert held == list(range(first, last)), "admission order, whole samples"
        assert len({len(rank) for rank in mini}) == 1, "as many micro-batches on every rank"
        if not lockstep:
            shares = [sum(map(len, rank)) for rank in mini]
            assert max(shares) - min(shares) <= 1, "as many sequences, or one more"
        steps = list(zip(*mini, strict=True))
        assert all(any(step) for step in steps), "no step of fillers alone"
        if (last - first) % ranks == 0:
            assert all(all(step) for step in steps), "no filler"
        for rank in mini:
            assert rank[0], "a sample on every rank, and first"
            assert rank == sorted(rank, key=lambda micro: not micro), "fillers last"
            for micro in rank:
                assert micro == sorted(micro)
                assert sum(lengths[i] for i in micro) <= budget or len(micro) == 1


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_tight_budget_puts_every_sample_alone_and_a_wide_one_packs_all(lockstep: bool):
    assert plan_batch(alone([5, 6, 7, 8]), 1, 1, 1, lockstep=lockstep) == [[[[3], [2], [1], [0]]]]
    assert plan_batch(alone([5, 6, 7, 8]), 1, 1, 26, lockstep=lockstep) == [[[[0, 1, 2, 3]]]]


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        # copies: as many samples on each, and as near in sums as that allows
        ({"dp": 2}, [[[0], [4, 5]], [[1, 3], [2]]]),
        ({"tp": 2, "dp": 2, "ep": 2}, [[[0], [4, 5]], [[1, 3], [2]]]),
        # experts for each other: the rank beside the longest sample takes more of the others
        ({"dp": 2, "ep": 2}, [[[0], [4]], [[1, 2], [3, 5]]]),
    ],
)
def test_ranks_that_share_experts_keep_step(parallel: dict[str, int], expected: list):
    config = LearnerConfig.model_validate({"parallel": parallel, "max_tokens_per_microbatch": 12})
    assert learner_plan(alone([30, 6, 6, 6, 6, 6]), config) == [expected]


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_mini_batch_of_64_on_three_ranks(lockstep: bool):
    """AsyncOPD's split of 8 GPUs. Alone, 64 samples leave two of 66 places to fillers."""
    lengths = [10 + i * 137 % 389 for i in range(128)]
    packed = plan_batch(alone(lengths), 2, 3, 1000, lockstep=lockstep)
    for mini in packed:
        loads = [sum(lengths[i] for micro in rank for i in micro) for rank in mini]
        assert max(loads) < 1.02 * sum(loads) / 3
        assert all(micro for rank in mini for micro in rank)
    for mini in plan_batch(alone(lengths), 2, 3, 1, lockstep=lockstep):
        assert sorted(sum(map(len, rank)) for rank in mini) == [21, 21, 22]
        assert [len(rank) for rank in mini] == [22] * 3
        assert sum(not micro for rank in mini for micro in rank) == 2


@pytest.mark.parametrize(("count", "minis", "ranks"), [(0, 1, 1), (3, 2, 1), (2, 1, 3), (6, 2, 4)])
def test_unequal_mini_batches_and_ranks_without_a_sample_are_refused(
    count: int, minis: int, ranks: int
):
    text = rf"at least {ranks} samples .* got {count} samples and num_mini_batches={minis}"
    with pytest.raises(ValueError, match=text):
        plan_batch(alone([1] * count), minis, ranks, 10)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=24),
    stages=st.integers(1, 4),
    cp=st.integers(1, 3),
    budget=st.integers(20, 120),
)
def test_the_learner_s_plan_fits_its_layout(lengths, stages, cp, budget):
    """Interleaved stages get a micro-batch each; samples fill 2 * cp chunks of one budget."""
    parallel = {"pp": stages, "vpp": 2, "cp": cp} if stages > 1 else {"cp": cp}
    config = LearnerConfig.model_validate(
        {"parallel": parallel, "max_tokens_per_microbatch": budget}
    )
    ((micros,),) = learner_plan(alone(lengths), config)
    assert sorted(i for micro in micros for i in micro) == list(range(len(lengths)))
    assert len(micros) >= stages
    unit = 2 * cp if cp > 1 else 1
    for micro in micros:
        assert len(micro) == 1 or sum(-(-lengths[i] // unit) * unit for i in micro) <= budget * cp


def test_too_few_samples_for_the_stages():
    with pytest.raises(ValueError, match=r"at least 8 samples \(4 for each of 2 .* got 7"):
        plan_batch(alone([1] * 7), 1, 2, 10, least_micros=4)
    ((first, second),) = plan_batch(alone([1] * 9), 1, 2, 10, least_micros=4)
    assert len(first) == len(second) == 4
