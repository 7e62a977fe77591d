"""A range of a flattened tensor as boxes: all of it, once, contiguous, in few pieces."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.learner.state.boxes import Box, boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    ends = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(ends), draw(ends)))
    return shape, start, stop


@given(ranges())
def test_boxes_are_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    found = list(boxes(shape, start, stop))
    read = [
        whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))].ravel()
        for box in found
    ]
    for box, elements in zip(found, read, strict=True):
        assert elements.tolist() == list(range(box.start, box.start + box.numel))
    assert np.concatenate([np.arange(0), *read]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1
    assert all(box.numel for box in found)


def test_a_range_that_ends_inside_rows() -> None:
    assert list(boxes((4, 5), 3, 17)) == [
        Box((0, 3), (1, 2), 3),
        Box((1, 0), (2, 5), 5),
        Box((3, 0), (1, 2), 15),
    ]
    assert list(boxes((4, 5), 0, 20)) == [Box((0, 0), (4, 5), 0)]
    assert list(boxes((4, 5), 6, 9)) == [Box((1, 1), (1, 3), 6)]
    assert list(boxes((7,), 2, 2)) == []
