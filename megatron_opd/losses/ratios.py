"""Computes quantiles of the importance ratio from a histogram that adds up over ranks.

Bins are logarithmic in |log rho|, on both sides of 0: ratios near 1 and far from it are resolved
alike, to RELATIVE_WIDTH of their logarithm.
"""

from __future__ import annotations

import math

import torch

SMALLEST, LARGEST, PER_SIDE = 1e-8, 100.0, 1024
RELATIVE_WIDTH = (LARGEST / SMALLEST) ** (1 / (PER_SIDE - 1)) - 1
NUM_BINS = 2 * PER_SIDE + 1
_STEP = math.log(LARGEST / SMALLEST) / (PER_SIDE - 1)


def ratio_histogram(log_ratio_N: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """Return float64 [NUM_BINS], weight by bin of log rho; the middle: |log rho| < SMALLEST."""
    size_N = log_ratio_N.double().abs().clamp(max=LARGEST)
    # Nearest bin centre: SMALLEST * exp(step * (bin - 1)).
    bin_N = (size_N.clamp(min=SMALLEST).log() - math.log(SMALLEST)).div_(_STEP).round_() + 1
    bin_N = torch.where(size_N < SMALLEST, 0.0, bin_N) * log_ratio_N.double().sign()
    histogram = torch.zeros(NUM_BINS, dtype=torch.float64, device=log_ratio_N.device)
    return histogram.index_add_(0, bin_N.long() + PER_SIDE, weight_N.double())


def ratio_quantile(histogram: torch.Tensor, quantile: float) -> float:
    """Return the ratio below which `quantile` of the weight lies; 1 for an empty histogram."""
    total = float(histogram.sum())
    if total == 0:
        return 1.0
    cumulative = histogram.cumsum(0)
    index = int(torch.searchsorted(cumulative, cumulative.new_tensor([quantile * total]))[0])
    signed = min(index, NUM_BINS - 1) - PER_SIDE
    if signed == 0:
        return 1.0
    size = SMALLEST * math.exp(_STEP * (abs(signed) - 1))
    return math.exp(math.copysign(size, signed))
