"""Properties of the batch plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.batching.plan import learner_plan, plan_batch
from megatron_opd.config.learner import LearnerConfig


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    minis, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    each = draw(st.integers(1, 8))
    count = minis * ranks * each
    lengths = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    return lengths, minis, ranks, draw(st.integers(1, 600))


@given(problems())
def test_plan_invariants(problem: tuple[list[int], int, int, int]):
    lengths, minis, ranks, budget = problem
    plan = plan_batch(lengths, minis, ranks, budget)
    assert len(plan) == minis
    per_mini = len(lengths) // minis
    for index, mini in enumerate(plan):
        assert len(mini) == ranks
        held = sorted(i for rank in mini for micro in rank for i in micro)
        assert held == list(range(index * per_mini, (index + 1) * per_mini)), "admission order"
        assert len({len(rank) for rank in mini}) == 1, "as many micro-batches on every rank"
        assert len({sum(map(len, rank)) for rank in mini}) == 1, "as many samples on every rank"
        for rank in mini:
            for micro in rank:
                assert micro
                assert micro == sorted(micro)
                assert sum(lengths[i] for i in micro) <= budget or len(micro) == 1


@given(problems())
def test_ranks_are_balanced(problem: tuple[list[int], int, int, int]):
    lengths, minis, ranks, budget = problem
    for mini in plan_batch(lengths, minis, ranks, budget):
        loads = [sum(lengths[i] for micro in rank for i in micro) for rank in mini]
        held = [lengths[i] for rank in mini for micro in rank for i in micro]
        # Equal counts: exchanging one sample pair could not gain more than the longest sample.
        assert max(loads) - min(loads) <= max(held)


def test_a_tight_budget_puts_every_sample_alone_and_a_wide_one_packs_all():
    assert plan_batch([5, 6, 7, 8], 1, 1, 1) == [[[[0], [1], [2], [3]]]]
    assert plan_batch([5, 6, 7, 8], 1, 1, 26) == [[[[0, 1, 2, 3]]]]


def test_a_rank_of_short_samples_splits_to_keep_step():
    (mini,) = plan_batch([100, 100, 1, 1], 1, 2, 100)
    assert [len(rank) for rank in mini] == [2, 2]


@pytest.mark.parametrize(("count", "minis", "ranks"), [(0, 1, 1), (3, 2, 1), (4, 1, 3), (6, 2, 2)])
def test_an_unequal_share_is_refused(count: int, minis: int, ranks: int):
    with pytest.raises(ValueError, match=rf"got {count} and {minis} \* {ranks}"):
        plan_batch([1] * count, minis, ranks, 10)


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
    ((micros,),) = learner_plan(lengths, config)
    assert sorted(i for micro in micros for i in micro) == list(range(len(lengths)))
    assert len(micros) >= stages
    unit = 2 * cp if cp > 1 else 1
    for micro in micros:
        assert len(micro) == 1 or sum(-(-lengths[i] // unit) * unit for i in micro) <= budget * cp


def test_micro_batches_of_a_rank_are_nearly_equal():
    ((micros,),) = plan_batch([50, 40, 30, 20, 10, 10], 1, 1, 80)
    assert sorted(sum([50, 40, 30, 20, 10, 10][i] for i in micro) for micro in micros) == [80, 80]
    assert plan_batch([50, 10, 10, 10], 1, 1, 50) == [[[[0], [1, 2, 3]]]]


def test_too_few_samples_for_the_stages():
    with pytest.raises(ValueError, match="must hold at least 4 samples, got 2"):
        plan_batch([1, 1, 1, 1], 1, 2, 10, least_micros=4)
