"""Reducers."""

import math

import pytest

from megatron_opd.metrics.types import Histogram, Max, Mean, Sum


def test_reducers():
    mean, largest, total, histogram = Mean(), Max(), Sum(), Histogram()
    assert (mean.value, largest.value, total.value, histogram.mean) == (None, None, 0.0, None)
    mean.add(1.0, weight=3)
    mean.add(5.0)
    assert mean.value == 2.0
    for value in (-2.0, -5.0):
        largest.add(value)
        total.add(value)
    assert (largest.value, total.value) == (-2.0, -7.0)
    histogram.add(0, 3)
    histogram.add(2)
    assert (histogram.mean, histogram.max, histogram.as_json()) == (0.5, 2, {"0": 3, "2": 1})
    with pytest.raises(ValueError, match="finite"):
        mean.add(math.nan)
