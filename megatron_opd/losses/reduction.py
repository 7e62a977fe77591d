"""From per-action terms to one number.

Sums, never means: micro-batches and ranks hold different numbers of tokens, so a mean of means
would weigh their tokens unequally. The division by the global token count comes last.
"""

from __future__ import annotations

import torch


def weighted_sum(term_N: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """sum_n weight_n term_n over entries of positive weight; float64 accumulation, scalar.

    An entry of weight 0 (a path token that no draw hit) counts exactly 0, whatever its term is:
    its teacher score may be -inf.
    """
    return (weight_N * term_N.masked_fill(weight_N == 0, 0)).sum(dtype=torch.float64)
