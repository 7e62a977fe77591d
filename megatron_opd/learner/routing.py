"""Replays routing (R3): a token's experts are given, not chosen; on request their weights too.

By default a gate stays the learner's own: the probabilities of the given experts come from its
router's logits now, normalised as the model does it, so that gradients reach the router. With the
sampler's weights (`learner.routing_weights: sampler`) the value is given and the gradient stays the
router's (with_sampled_gates). Balancing losses see the router's own probabilities either way.

Invariant: the experts of a micro-batch travel on its packing, which Megatron hands to every layer
in the forward pass and again when the layer is recomputed. No order of micro-batches, stages or
chunks can mix them up. Expert layers that are recomputed alone (`recompute_modules: [moe]`) get no
packing: there each layer's backward passes come in the order of its forward passes.

Axes: X inputs of samples (P + T - 1 each), L layers with experts, s positions of this
context-parallel rank, m positions of this rank's routers (s / tp, sequence parallelism), k experts
of a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_opd.config.learner import LearnerConfig, RoutingReplay, RoutingWeights
from megatron_opd.learner.routing_checks import (
    check_experts,
    check_gates,
    check_replay,
    scaled_gates,
)
from megatron_opd.learner.top_k import SortedTopK, TopK
from megatron_opd.learner.world import World
from megatron_opd.losses.host import sent
from megatron_opd.models.spec import ModelSpec
from megatron_opd.records.columns import RankInputs
from megatron_opd.records.types import ExpertArray, GateArray


@dataclass(frozen=True)
class MicroRouting:
    """Holds the experts of one micro-batch on this rank.

    given: by layer (index into L) int16 [m, k], -1 in rows that route freely; a layer that is not
    there yet is recorded when it is first computed. real_m: bool, no filler. moved: by layer, how
    many real positions the router would have sent elsewhere, and of how many given experts it would
    have chosen others; None until it is replayed. follows: visit what is given; otherwise the
    router's choice is only compared with it. gates: by layer float32 [m, k], the weights of the
    given experts, -1 in rows that route freely; empty where the router's own count.
    """

    given: dict[int, torch.Tensor]
    real_m: torch.Tensor
    moved: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    follows: bool = True
    gates: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def experts(self, layer: int, own_mk: torch.Tensor) -> torch.Tensor:
        """Return int64 [m, k]: the experts `layer` uses; own_mk: what its router would choose.

        The same however often it is asked, and a recomputed layer counts once.
        """
        if layer not in self.given:
            self.given[layer] = own_mk.to(torch.int16)
            return own_mk
        given_mk = self.given[layer].long()
        assert given_mk.shape == own_mk.shape, f"{given_mk.shape} given, {own_mk.shape} routed"
        used_mk = torch.where(given_mk[:, :1] < 0, own_mk, given_mk)
        # experts of a token are distinct: it moved if one of them is not among the router's own
        other_mk = (used_mk[:, :, None] != own_mk[:, None, :]).all(2) & self.real_m[:, None]
        self.moved[layer] = torch.stack([other_mk.any(1).sum(), other_mk.sum()])
        return used_mk if self.follows else own_mk

    def gates_of(self, layer: int) -> torch.Tensor | None:
        """Return the weights of the experts that `layer` uses; None: the router's own."""
        return self.gates.get(layer) if self.follows else None

    def counts(self) -> torch.Tensor:
        """Return what moved on this rank, and what could have: int64 [4], on its device.

        That is (position, layer) pairs, and all of them; (position, layer, slot) choices, and all.
        """
        pairs = self.real_m.sum() * len(self.moved)
        slots = next((given_mk.shape[1] for given_mk in self.given.values()), 0)
        none = torch.zeros_like(pairs).expand(2)
        moved, choices = sum(self.moved.values(), start=none).unbind()
        return torch.stack([moved, pairs, choices, pairs * slots])


class LayerReplay(SortedTopK):
    """Chooses the experts for one router, which asks it instead of taking its own top k.

    alone: the expert layer is recomputed without the rest of its transformer layer.
    """

    def __init__(self, layer: int, alone: bool) -> None:
        super().__init__()
        self._layer, self._alone = layer, alone
        self._micro: MicroRouting | None = None
        self._recomputed_next: deque[MicroRouting | None] = deque()
        self._weighed: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self, micro: MicroRouting | None) -> None:
        """Begin this micro-batch, as its transformer layer begins to compute it."""
        self._micro = micro
        if self._alone and torch.is_grad_enabled():
            self._recomputed_next.append(micro)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [m, k] scores of the experts to use, and the experts; scores: [m, experts]."""
        values_mk, own_mk = super().get_replay_topk(
            scores, topk, num_groups, group_topk, default_compute_topk
        )
        micro = self._micro
        if self._alone and torch.is_grad_enabled():  # its forward pass ran without gradients
            micro = self._recomputed_next.popleft()
        if micro is None:
            return values_mk, own_mk
        used_mk, gates_mk = micro.experts(self._layer, own_mk), micro.gates_of(self._layer)
        self._weighed = None if gates_mk is None else (used_mk, gates_mk)
        return scores.gather(1, used_mk), used_mk

    def weigh(self, probs_mE: torch.Tensor) -> torch.Tensor:
        """Return the weights of the experts just chosen: the given ones, if there are any."""
        weighed, self._weighed = self._weighed, None
        return probs_mE if weighed is None else with_sampled_gates(probs_mE, *weighed)


def _enter(replay: LayerReplay, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    replay.enter(getattr(kwargs.get("packed_seq_params"), "routing", None))


def _weigh(replay: LayerReplay, router: Any, args: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
    probs_mE, chosen_mE = found
    return replay.weigh(probs_mE), chosen_mE


@dataclass(frozen=True)
class Routing:
    """Replays over a model's chunks. layers: indices into L of this rank's, rising."""

    mode: RoutingReplay
    weights: RoutingWeights
    spec: ModelSpec
    layers: tuple[int, ...]
    device: torch.device
    tp: int
    tp_rank: int

    @classmethod
    def of(
        cls,
        config: LearnerConfig,
        chunks: Sequence[torch.nn.Module],
        spec: ModelSpec,
        world: World,
    ) -> Routing | None:
        """Take over the routers' choice, on request their weights; None without a replay.

        ValueError: see check_replay.
        """
        mode, weights = config.routing_replay, config.routing_weights
        if mode == "off":
            return None
        check_replay(mode, spec, chunks[0].config)
        layers: list[int] = []
        for module in (m for chunk in chunks for m in chunk.modules()):
            if isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer):
                layer = sum(spec.moe_layers[: module.layer_number - 1])
                replay = LayerReplay(layer, module.mlp.moe_layer_recompute)
                router: Any = module.mlp.router
                router.router_replay = replay
                module.register_forward_pre_hook(partial(_enter, replay), with_kwargs=True)
                if weights == "sampler":
                    router.register_forward_hook(partial(_weigh, replay))
                layers.append(layer)
        assert layers == sorted(layers), layers
        tp = world.parallel.tp
        return cls(mode, weights, spec, tuple(layers), world.device, tp, world.tp_rank)

    def micro(
        self, experts_XLk: ExpertArray | None, gates_XLk: GateArray | None, source_s: np.ndarray
    ) -> MicroRouting:
        """Return the routing of a micro-batch, whose positions hold inputs source_s (layout.Rows).

        experts_XLk, gates_XLk: of its samples, in this rank's layers; read in the mode `rollout`
        alone, the second with the sampler's weights alone. `check` has seen them.
        """
        per_rank = len(source_s) // self.tp
        source_m = source_s[self.tp_rank * per_rank : (self.tp_rank + 1) * per_rank]
        real_m = sent(source_m >= 0, self.device)
        if self.mode == "current" or not self.layers:
            return MicroRouting({}, real_m)
        assert experts_XLk is not None
        given = self._by_layer(experts_XLk, source_m, np.dtype(np.int16))
        if self.weights == "learner":
            return MicroRouting(given, real_m)
        assert gates_XLk is not None
        gates_XLk = scaled_gates(self.spec, gates_XLk)
        gates = self._by_layer(gates_XLk, source_m, np.dtype(np.float32))
        return MicroRouting(given, real_m, gates=gates)

    def check(self, batch: RankInputs) -> None:
        """Raise ValueError unless the batch holds what this rank's layers replay.

        That is k distinct experts of the model in each layer, and with the sampler's weights those
        of a model that normalises them so.
        """
        if self.mode == "current" or not self.layers:
            return
        experts_XLk, gates_XLk = batch.experts_XLk, batch.gates_XLk
        if experts_XLk is None:
            raise ValueError(
                "learner.routing_replay is rollout, but the samples carry no routed experts"
            )
        check_experts(self.spec, len(self.layers), experts_XLk)
        if self.weights == "learner":
            return
        if gates_XLk is None:
            raise ValueError(
                "learner.routing_weights is sampler, but the samples carry no gate weights"
            )
        check_gates(self.spec, gates_XLk, experts_XLk)

    def _by_layer(
        self, values_XLk: np.ndarray, source_m: np.ndarray, dtype: np.dtype[Any]
    ) -> dict[int, torch.Tensor]:
        """Return what this rank's layers hold of its positions, -1 where there is no input."""
        found_mLk = np.full((len(source_m), *values_XLk.shape[1:]), -1, dtype)
        found_mLk[source_m >= 0] = values_XLk[source_m[source_m >= 0]]
        found = sent(found_mLk, self.device)
        return {layer: found[:, i] for i, layer in enumerate(self.layers)}


def with_sampled_gates(
    probs_mE: torch.Tensor, used_mk: torch.Tensor, gates_mk: torch.Tensor
) -> torch.Tensor:
    """Return [m, E] weights of the experts: the value is `gates_mk`, the derivative the router's.

    probs_mE: the router's own weights of the experts used_mk, 0 elsewhere. gates_mk: the sampler's,
    in the order of used_mk; negative or not finite where there is no record: there the own ones
    stay.

    A straight-through estimate: value + (own - own.detach()). The sampler's weights are constants,
    so with them alone the router would get no gradient and never learn. Here the loss is
    differentiated where the sampler was, and each weight counts as the learner's own: d loss / d
    logits = sum over k of (d loss / d weight_k at the sampler's weights) * (d own_k / d logits).
    That is exact where own and sampled weights agree; where they differ, by rounding or because the
    router has learnt since, it is biased, and the forward pass does not see the difference.
    `own - own.detach()` is 0, so the value is the sampler's to the last bit.
    """
    own_mE = probs_mE.detach()
    recorded_mk = torch.isfinite(gates_mk) & (gates_mk >= 0)
    value_mk = torch.where(recorded_mk, gates_mk.to(own_mE.dtype), own_mE.gather(1, used_mk))
    return own_mE.scatter(1, used_mk, value_mk) + (probs_mE - own_mE)
