"""Properties of shares of ranks that meet at the end of a mini-batch."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.batching.per_rank import pack_per_rank, share_out
from megatron_opd.batching.steps import load_of


@given(st.lists(st.integers(1, 300), min_size=12, max_size=12), st.integers(1, 600))
def test_every_rank_goes_from_heavy_to_light(lengths: list[int], budget: int):
    ranks = pack_per_rank(range(12), lengths, ranks=3, budget=budget)
    for micros in ranks:
        loads = [load_of(micro, lengths) for micro in micros]
        assert all(a >= b for a, b in pairwise(loads))
    assert sorted(i for rank in ranks for micro in rank for i in micro) == list(range(12))
    assert {sum(map(len, rank)) for rank in ranks} == {4}, "as many samples on every rank"


@given(
    st.lists(st.integers(1, 300), min_size=3, max_size=40),
    st.integers(1, 600),
    st.integers(1, 3),
)
def test_ranks_that_divide_nothing(lengths: list[int], budget: int, ranks: int):
    found = pack_per_rank(range(len(lengths)), lengths, ranks=ranks, budget=budget)
    shares = [sum(map(len, rank)) for rank in found]
    assert sum(shares) == len(lengths)
    assert max(shares) - min(shares) <= 1
    (count,) = {len(micros) for micros in found}
    assert any(all(micros) for micros in found), "as many as some rank has micro-batches"
    for micros, held in zip(found, shares, strict=True):
        fillers = [micro for micro in micros if not micro]
        assert len(fillers) == max(0, count - held), "only where no sample is left to be alone"


def test_a_rank_of_fewer_samples_runs_a_filler():
    assert pack_per_rank(range(3), [5, 5, 5], ranks=2, budget=5) == [[[0], [2]], [[1], []]]


@given(st.lists(st.integers(1, 300), min_size=12, max_size=15))
def test_ranks_are_balanced(lengths: list[int]):
    loads = [load_of(share, lengths) for share in share_out(range(len(lengths)), lengths, 4)]
    # Equal counts: exchanging one sample pair could not gain more than the longest sample.
    assert max(loads) - min(loads) <= max(lengths)


def test_micro_batches_of_a_rank_are_nearly_equal():
    lengths = [50, 40, 30, 20, 10, 10]
    (micros,) = pack_per_rank(range(6), lengths, ranks=1, budget=80)
    assert [load_of(micro, lengths) for micro in micros] == [80, 80]
    assert pack_per_rank(range(4), [50, 10, 10, 10], ranks=1, budget=50) == [[[0], [1, 2, 3]]]


def test_a_rank_of_short_samples_splits_to_keep_step():
    ranks = pack_per_rank(range(4), [100, 100, 1, 1], ranks=2, budget=100)
    assert [len(micros) for micros in ranks] == [2, 2]
