"""Two tokenisations of the same bytes, against loops over the bytes."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.rollout.alignment.spans import NOWHERE, spans_of

LENGTHS = st.lists(st.integers(1, 4), max_size=8)


@given(LENGTHS, LENGTHS)
def test_spans_are_those_that_loops_find(ours: list[int], theirs: list[int]) -> None:
    found = spans_of(ours, theirs)
    mine, yours = [0, *accumulate(ours)], [0, *accumulate(theirs)]
    common = [b for b in mine if b in yours]

    def chunk(end: int) -> int:
        return sum(b < end for b in common) - 1 if end <= common[-1] else NOWHERE

    starts = [yours[:-1].index(b) if b in yours[:-1] else NOWHERE for b in mine[:-1]]
    assert found.row_T.tolist() == starts
    assert found.chunk_T.tolist() == [chunk(b) for b in mine[1:]]
    assert found.chunk_R.tolist() == [chunk(b) for b in yours[1:]]
    assert found.num_chunks == len(common) - 1
    spans = list(pairwise(yours))
    same = [spans.index(each) if each in spans else NOWHERE for each in pairwise(mine)]
    assert found.same_T.tolist() == same


def test_equal_tokenisations_are_aligned_token_by_token() -> None:
    found = spans_of([2, 1, 3], [2, 1, 3])
    assert found.row_T.tolist() == found.chunk_T.tolist() == found.chunk_R.tolist() == [0, 1, 2]
