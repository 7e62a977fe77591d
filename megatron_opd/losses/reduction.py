"""Reduces per-token losses to one number.

Sums and one count, never means: micro-batches and ranks hold different numbers of tokens, so a mean
of means would weigh their tokens unequally. The division by the global count comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_opd.config.reductions import (
    FixedReduction,
    ReductionConfig,
    SequenceReduction,
    TokenReduction,
)
from megatron_opd.losses.cache import Cache


def by_token(config: TokenReduction, loss_T: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Sum the losses of all tokens."""
    return loss_T.sum()


def by_sequence(config: SequenceReduction, loss_T: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Sum over samples the mean of each; one of several sequences is the sum of their shares."""
    return (cache.over_responses(loss_T, mean=True) * cache.share_B).sum()


def by_constant(config: FixedReduction, loss_T: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Sum over tokens and divide by the constant length."""
    return loss_T.sum() / config.length


REDUCTIONS: dict[type[Any], Callable[[Any, torch.Tensor, Cache], torch.Tensor]] = {
    TokenReduction: by_token,
    SequenceReduction: by_sequence,
    FixedReduction: by_constant,
}


def reduced(config: ReductionConfig, loss_T: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Return the loss sum; count_of says what the global one is divided by."""
    return REDUCTIONS[type(config)](config, loss_T, cache)


def count_of(config: ReductionConfig, num_tokens: int, num_samples: float) -> float:
    """Return what a reduction counts: sampled tokens, or samples, of which parts may be counted.

    Both without those that no term reads (losses/weights.py).
    """
    return num_tokens if isinstance(config, TokenReduction) else num_samples
