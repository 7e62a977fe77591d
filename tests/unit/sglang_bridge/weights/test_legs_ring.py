"""Pieces of a ring never overlap while they are lent, and come back in order."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.weights.legs import ALIGNED, Ring

SIZE = 10 * ALIGNED


@given(sizes=st.lists(st.integers(1, SIZE), max_size=40))
def test_no_two_pieces_that_are_lent_overlap(sizes: list[int]):
    ring = Ring(SIZE)
    lent: deque[tuple[int, int]] = deque()
    for size in sizes:
        while (start := ring.take(size)) is None:
            assert lent, "an empty ring has room for everything"
            lent.popleft()
            ring.give_back()
        assert start % ALIGNED == 0
        assert start + size <= SIZE, "a piece lies in one piece"
        assert all(start + size <= other or end <= start for other, end in lent)
        lent.append((start, start + size))


def test_small_pieces_fill_all_of_it():
    ring = Ring(SIZE)
    assert [ring.take(ALIGNED) for _ in range(10)] == [i * ALIGNED for i in range(10)]
    assert ring.take(1) is None
    ring.give_back()
    assert ring.take(1) == 0


@pytest.mark.parametrize("nbytes", [0, SIZE + 1])
def test_what_never_fits_is_no_wait_without_end(nbytes: int):
    with pytest.raises(AssertionError):
        Ring(SIZE).take(nbytes)
