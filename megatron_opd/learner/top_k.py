"""Keeps the order of a router's experts the same in every pass over a micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class SortedTopK(RouterReplay):
    """Makes a router choose its experts in one order, whether or not gradients are computed.

    Megatron-Core 0.19.2 sorts the top k where gradients are enabled alone. Softmax over the chosen
    experts adds in their order, so that a layer's first pass and its recomputation, or a scoring
    pass and the training pass, would differ in the last bit.
    """

    def __init__(self) -> None:
        """Leave out what the parent does: it keeps every instance, for Megatron's own switches."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [m, k] scores, falling, and their experts; scores: [m, experts]."""
        assert default_compute_topk is not None
        with torch.enable_grad():
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)


def sort_choices(chunk: torch.nn.Module) -> None:
    """Make every router of a model choose in one order, see SortedTopK."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = SortedTopK()
