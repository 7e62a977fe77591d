"""Weighs load-balancing losses of MoE routers equally at every layout.

The objective is policy loss / count + sum over kinds of coefficient * mean over micro-batches of
the kind's loss (Switch Transformer's over a micro-batch, a sequence, or, `global_aux_loss`, all
data-parallel ranks), fillers left out. Megatron-Core 0.19.2 weighs each micro-batch by the tokens
that its ranks hold and then divides by the policy loss's count: prompts would raise the weight.
Here routers add their losses unweighed, and the
coefficients carry count / micro-batches instead. It also divides by the tokens of a micro-batch, of
which a filler has none, and takes a mask of positions for one of experts where it counts what moves
an expert's bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import Router

_counted_by_megatron: Any = megatron_router.TopKRouter._apply_expert_bias  # pyright: ignore[reportPrivateUsage]
GLOBAL = "global_aux_loss"  # one loss of all data-parallel ranks together
TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    GLOBAL: "global_load_balancing_loss",
}
"""Megatron's names of the losses that it keeps, by kind."""


@dataclass(frozen=True)
class Balancing:
    """Holds Megatron's settings, shared by all chunks, and the configured coefficients."""

    settings: Any
    kinds: tuple[str, ...]
    coefficients: tuple[float, ...]
    z_coefficient: float | None
    moe_layers: int

    @classmethod
    def of(cls, chunks: Sequence[torch.nn.Module], moe_layers: int) -> Balancing | None:
        """Take over the weights of the routers' losses; None when no such loss is configured."""
        settings: Any = chunks[0].config
        if settings.moe_router_enable_expert_bias:
            router: Any = megatron_router.TopKRouter
            router._apply_expert_bias = counted_for_bias
        kinds, values = settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        values = (values,) * len(kinds) if isinstance(values, float | int) else tuple(values)
        z = settings.moe_z_loss_coeff
        if settings.num_moe_experts is None or not (any(values) or z):
            return None
        megatron_router.switch_load_balancing_loss_func = zero_of_no_tokens
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    module.calculate_per_token_loss = False
        return cls(settings, kinds, tuple(map(float, values)), z, moe_layers)

    def weigh(self, count: float, micros: int, fillers: int) -> int:
        """Set the weights of a mini-batch. Collective over data-parallel ranks.

        count: this rank's part of what the policy loss is divided by. micros: its micro-batches,
        as many as on every rank, `fillers` of them without a token. Returns how many losses of the
        first kind there are over all ranks: see mean_loss.
        """
        group: Any = ps.get_data_parallel_group()
        sums = torch.tensor(
            [count, micros - fillers], dtype=torch.float64, device=torch.cuda.current_device()
        )
        dist.all_reduce(sums, group=group)
        total, filled = sums.tolist()
        own, shared = total / filled, total / micros
        scaled = [
            value * (shared if kind == GLOBAL else own)
            for kind, value in zip(self.kinds, self.coefficients, strict=True)
        ]
        self.settings.moe_aux_loss_coeff = scaled if len(scaled) > 1 else scaled[0]
        if self.z_coefficient is not None:
            self.settings.moe_z_loss_coeff = self.z_coefficient * own
        return micros if self.kinds[0] == GLOBAL else int(filled)

    def mean_loss(self, losses: int) -> float | None:
        """Return the first kind's mean loss over layers and micro-batches after a mini-batch.

        losses: what `weigh` returned. Unweighed: 1 when every expert gets the same share. None:
        there is no kind, only the loss of large logits. Collective over the world.
        """
        tracker = get_moe_metrics_tracker()
        if self.kinds[0] not in TRACKED:
            tracker.clear()
            return None
        total = torch.zeros((), device=torch.cuda.current_device())
        kept = tracker.metrics.get(TRACKED[self.kinds[0]])
        if kept is not None:  # a pipeline stage of dense layers has none
            total += kept.values.sum()
        dist.all_reduce(total)
        tracker.clear()
        return float(total) / (self.moe_layers * losses)


def counted_for_bias(
    router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> None:
    """Count the tokens of each expert, for its bias. padding_mask: bool [m], what not to count."""
    mask = None if padding_mask is None else padding_mask[:, None]
    _counted_by_megatron(router, routing_map, padding_mask=mask)


def zero_of_no_tokens(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: torch.Tensor,
    **others: Any,
) -> torch.Tensor:
    """Return Megatron's balancing loss; of no tokens 0, where Megatron returns NaN."""
    least: Any = total_num_tokens.clamp(min=1)
    return switch_load_balancing_loss_func(probs, tokens_per_expert, least, **others)
