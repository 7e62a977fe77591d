"""Histograms of ratios and their quantiles."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.losses.ratios import NUM_BINS, ratio_histogram, ratio_quantile


@settings(deadline=None)
@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=50),
    st.floats(0.01, 0.99),
)
def test_histogram_quantile_is_the_weighted_quantile(values: list[float], quantile: float):
    log_ratio_N = torch.tensor(values, dtype=torch.float64)
    weight_N = torch.linspace(0.5, 1.5, len(values), dtype=torch.float64)
    histogram = ratio_histogram(log_ratio_N, weight_N)
    assert histogram.shape == (NUM_BINS,)
    assert float(histogram.sum()) == pytest.approx(float(weight_N.sum()))
    found = math.log(ratio_quantile(histogram, quantile))
    ordered, order = log_ratio_N.sort()
    reached = weight_N[order].cumsum(0) / weight_N.sum()
    # Any neighbour within float error of the cut is a right answer.
    low = ordered[min(int((reached < quantile - 1e-9).sum()), len(values) - 1)]
    high = ordered[min(int((reached < quantile + 1e-9).sum()), len(values) - 1)]
    slack = 0.02 * max(abs(float(low)), abs(float(high))) + 2e-8
    assert float(low) - slack <= found <= float(high) + slack


def test_histograms_add_up_and_empty_means_one():
    values = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one = torch.ones(100, dtype=torch.float64)
    parts = ratio_histogram(values[:30], one[:30]) + ratio_histogram(values[30:], one[30:])
    torch.testing.assert_close(parts, ratio_histogram(values, one))
    assert ratio_quantile(torch.zeros(NUM_BINS, dtype=torch.float64), 0.5) == 1.0
