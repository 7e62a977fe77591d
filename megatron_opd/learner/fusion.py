"""Builds models whose weight gradients TransformerEngine adds in place, without apex.

Megatron's switch `gradient_accumulation_fusion` is one for all layers, and its own linear layers
refuse it without apex's kernel. Beside TransformerEngine's layers the LM head alone is such a
layer: it is let through and keeps its ordinary gradient. The lean log-prob operation adds to
`main_grad` by itself (losses/lean.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def built_without_apex(make: Callable[[], ModuleT]) -> ModuleT:
    """Return make(), with Megatron's own linear layers not fused where apex's kernel is missing."""
    kernel = layers._grad_accum_fusion_available  # pyright: ignore[reportPrivateUsage]
    layers._grad_accum_fusion_available = True  # pyright: ignore[reportPrivateUsage]
    try:
        model = make()
    finally:
        layers._grad_accum_fusion_available = kernel  # pyright: ignore[reportPrivateUsage]
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gradient_accumulation_fusion = module.gradient_accumulation_fusion and kernel
    return model
