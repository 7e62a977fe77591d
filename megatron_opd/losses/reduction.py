"""From per-token losses to one number.

Sums and one count, never means: micro-batches and ranks hold different numbers of tokens, so a mean
of means would weigh their tokens unequally. The division by the global count comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_opd.config.corrections import (
    FixedReduction,
    ReductionConfig,
    SequenceReduction,
    TokenReduction,
)
from megatron_opd.losses.cache import Cache


def by_token(
    config: TokenReduction, loss_T: torch.Tensor, cache: Cache
) -> tuple[torch.Tensor, int]:
    """Sum over tokens; counts tokens."""
    return loss_T.sum(), cache.num_tokens


def by_sequence(
    config: SequenceReduction, loss_T: torch.Tensor, cache: Cache
) -> tuple[torch.Tensor, int]:
    """Sum over responses of their mean; counts responses."""
    return cache.over_responses(loss_T, mean=True).sum(), cache.num_samples


def by_constant(
    config: FixedReduction, loss_T: torch.Tensor, cache: Cache
) -> tuple[torch.Tensor, int]:
    """Sum over tokens, over the constant length; counts responses."""
    return loss_T.sum() / config.length, cache.num_samples


REDUCTIONS: dict[type[Any], Callable[[Any, torch.Tensor, Cache], tuple[torch.Tensor, int]]] = {
    TokenReduction: by_token,
    SequenceReduction: by_sequence,
    FixedReduction: by_constant,
}


def reduced(
    config: ReductionConfig, loss_T: torch.Tensor, cache: Cache
) -> tuple[torch.Tensor, int]:
    """(loss sum, what the global sum is divided by)."""
    return REDUCTIONS[type(config)](config, loss_T, cache)
