"""Properties of the steps that data-parallel ranks take together."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.batching.per_rank import pack_per_rank
from megatron_opd.batching.steps import Step, by_rank, load_of, pack_steps


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    ranks, least, more = (draw(st.integers(low, 5)) for low in (1, 1, 0))
    count = ranks * (least + more) + draw(st.integers(0, ranks - 1))
    lengths = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    return lengths, ranks, draw(st.integers(1, 600)), least


def seconds(steps: list[Step], lengths: list[int]) -> int:
    """The sum over steps of the heaviest load."""
    return sum(max(load_of(micro, lengths) for micro in step) for step in steps)


@given(problems())
def test_invariants(problem: tuple[list[int], int, int, int]):
    lengths, ranks, budget, least = problem
    steps = pack_steps(range(len(lengths)), lengths, ranks=ranks, budget=budget, least=least)

    assert sorted(i for step in steps for micro in step for i in micro) == list(range(len(lengths)))
    assert len(steps) >= least
    empty = [sum(not micro for micro in step) for step in steps]
    assert empty.count(0) >= len(steps) - 1
    assert max(empty) < ranks
    if any(empty):
        assert len(steps) == -(-len(lengths) // ranks), "a filler only where each is alone"
    for step in steps:
        assert len(step) == ranks, "a micro-batch for every rank"
        loads = [load_of(micro, lengths) for micro in step]
        assert loads == sorted(loads, reverse=True)
        for micro, load in zip(step, loads, strict=True):
            assert load <= budget or len(micro) == 1
    heaviest = [load_of(step[0], lengths) for step in steps]
    assert all(a >= b for a, b in pairwise(heaviest)), "heaviest steps first"


@given(problems())
def test_ranks_keep_the_steps(problem: tuple[list[int], int, int, int]):
    lengths, ranks, budget, least = problem
    steps = pack_steps(range(len(lengths)), lengths, ranks=ranks, budget=budget, least=least)
    found = by_rank(steps, lengths)
    assert len(found) == ranks
    for step, together in zip(steps, zip(*found, strict=True), strict=True):
        assert sorted(together) == sorted(step)


@given(st.lists(st.integers(1, 60), min_size=6, max_size=6), st.integers(1, 200), st.randoms())
def test_the_order_of_equal_samples_alone_matters(
    lengths: list[int], budget: int, shuffled: random.Random
):
    """The loads of the steps depend on the lengths, not on who stands where."""
    other = list(lengths)
    shuffled.shuffle(other)
    loads = [
        [
            [load_of(micro, given) for micro in step]
            for step in pack_steps(range(6), given, ranks=2, budget=budget)
        ]
        for given in (lengths, other)
    ]
    assert loads[0] == loads[1]


def test_what_longer_than_the_budget_share_steps():
    """Two samples beyond the budget meet; the others fill up to the budget."""
    lengths = [30, 5, 5, 28, 5, 5]
    steps = pack_steps(range(6), lengths, ranks=2, budget=10)
    assert [[load_of(micro, lengths) for micro in step] for step in steps] == [[30, 28], [10, 10]]


def test_a_step_is_filled_to_what_its_longest_sample_takes():
    lengths = [90, 30, 30, 30, 10, 10, 10, 10]
    steps = pack_steps(range(8), lengths, ranks=2, budget=100)
    # 90 beside 30 + 30 + 30; the tens do not wait for them
    assert [[load_of(micro, lengths) for micro in step] for step in steps] == [[90, 90], [20, 20]]


def test_ranks_get_alike_sums():
    steps = [[[0], [1]], [[2], [3]]]
    lengths = [9, 5, 6, 2]
    assert by_rank(steps, lengths) == [[[0], [3]], [[1], [2]]]


@pytest.mark.parametrize("budget", [8192, 18432])
@pytest.mark.parametrize("each", [64, 256])
def test_ranks_wait_less_than_with_shares_of_their_own(budget: int, each: int):
    """Lognormal lengths, as responses have; 8 ranks."""
    draw = random.Random(each)
    lengths = [200 + min(16384, round(draw.lognormvariate(8.05, 0.7))) for _ in range(each)]
    steps = pack_steps(range(each), lengths, ranks=8, budget=budget)
    apart = pack_per_rank(range(each), lengths, ranks=8, budget=budget)
    heaviest_first = [list(step) for step in zip(*apart, strict=True)]
    by_sample = [list(step) for step in zip(*map(sorted, apart), strict=True)]
    ours = seconds(steps, lengths)
    assert sum(lengths) / 8 <= ours < seconds(heaviest_first, lengths)
    assert ours < 0.99 * seconds(by_sample, lengths)
