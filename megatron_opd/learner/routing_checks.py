"""Checks what is to be replayed: a model, its settings, experts that arrived and their weights."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from megatron_opd.config.defaults import BYPASSES
from megatron_opd.config.learner import RoutingReplay
from megatron_opd.models.spec import ModelSpec
from megatron_opd.records.types import ExpertArray, GateArray

# Float32 weights of a token are this near to their sum.
GATE_SLACK = 1e-4


def check_replay(mode: RoutingReplay, spec: ModelSpec, settings: Any) -> None:
    """Raise ValueError for what replay cannot do.

    That is a model without experts, and settings (a TransformerConfig) under which
    Megatron-Core 0.19.2 asks no replay, or not layer by layer.
    """
    if mode == "off":
        return
    if not spec.is_moe:
        raise ValueError(
            f"learner.routing_replay must be off for a student without experts, got {mode}"
        )
    for name, bypasses in BYPASSES.items():
        if bypasses(getattr(settings, name)):
            raise ValueError(
                f"learner.megatron.{name} must not be {getattr(settings, name)!r} with "
                f"learner.routing_replay={mode}: with it routers ignore the replayed experts"
            )


def check_experts(spec: ModelSpec, layers: int, experts_XLk: ExpertArray) -> None:
    """Raise ValueError unless every token has k distinct experts of this model in these layers."""
    shape = (layers, spec.experts_per_token)
    if experts_XLk.shape[1:] != shape:
        raise ValueError(
            f"routed experts must be {shape[0]} layers of {shape[1]} experts a token, "
            f"got {experts_XLk.shape[1:]}"
        )
    if int(experts_XLk.max()) >= spec.num_experts:
        raise ValueError(
            f"routed experts must be below {spec.num_experts}, got {int(experts_XLk.max())}"
        )
    for a, b in combinations(range(shape[1]), 2):
        if (experts_XLk[..., a] == experts_XLk[..., b]).any():
            raise ValueError("routed experts of a token must differ, got one twice")


def check_gates(spec: ModelSpec, gates_XLk: GateArray, experts_XLk: ExpertArray) -> None:
    """Raise ValueError for what cannot be the weights of these experts in this model."""
    if gates_XLk.shape != experts_XLk.shape:
        raise ValueError(
            f"gate weights must have the shape of their experts, {experts_XLk.shape}, "
            f"got {gates_XLk.shape}"
        )
    if not spec.norm_topk_prob:
        return
    sum_XL = gates_XLk.sum(-1, dtype=np.float64)
    # SGLang multiplies the experts' output by the scale, or the weights, as its kernels want it
    off_XL = np.minimum(np.abs(sum_XL - 1), np.abs(sum_XL / spec.routed_scale - 1))
    if not (off_XL <= GATE_SLACK).all():
        raise ValueError(
            "gate weights of a token must add up to 1 for this model (norm_topk_prob), but "
            f"some are off by {off_XL.max():.3g}"
        )


def scaled_gates(spec: ModelSpec, gates_XLk: GateArray) -> GateArray:
    """Return gate weights times the model's scale, which servers may have left to the output."""
    if spec.routed_scale == 1:
        return gates_XLk
    return gates_XLk / gates_XLk.sum(-1, keepdims=True) * np.float32(spec.routed_scale)
