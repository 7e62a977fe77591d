"""Busy time is the union of intervals."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.metrics.intervals import BusyTime

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda x: (x[0], x[0] + x[1])),
    max_size=12,
)


def covered(spans):
    """The unit cells that integer intervals cover: the obvious oracle."""
    return {cell for start, stop in spans for cell in range(start, stop)}


@settings(deadline=None)
@given(intervals, intervals)
def test_busy_time_is_the_union(first, second):
    busy, other = BusyTime(first), BusyTime(second)
    assert busy.seconds == len(covered(first))
    assert busy.seconds_outside(other) == len(covered(first) - covered(second))
    merged = busy.intervals
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


def test_busy_time_refuses_a_reversed_interval():
    with pytest.raises(ValueError, match=r"2\.0\.\.1\.0"):
        BusyTime().add(2.0, 1.0)
