"""Splits SGLang's torch-native experts over ranks; by themselves they expect to hold all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def local_experts_only(
    original: Callable[..., torch.Tensor],
    layer: Any,
    x_TH: torch.Tensor,
    topk_output: Any,
    config: Any,
) -> torch.Tensor:
    """Sums this rank's experts alone: moe_forward_native, with other ranks' experts as id -1.

    x_TH: [tokens, hidden]. The ranks' results are added by the caller's all-reduce. Used on CPU,
    where the fused kernels do not exist. Experts whose gates are clamped (gpt-oss) are always
    computed here: SGLang's own function has theirs compiled.
    """
    weight_TK, expert_TK, _ = topk_output
    limit, alpha = (getattr(config, f"gemm1_{name}", None) for name in ("clamp_limit", "alpha"))
    if alpha is None and not (expert_TK < 0).any():
        return original(layer, x_TH, topk_output, config)
    bias_13, bias_2 = (getattr(layer, f"{name}_weight_bias", None) for name in ("w13", "w2"))
    out_TH = torch.zeros_like(x_TH)
    for expert in range(layer.w13_weight.shape[0]):
        token, slot = (expert_TK == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        inner = _plus(functional.linear(x_TH[token], layer.w13_weight[expert]), bias_13, expert)
        y = functional.linear(gated(inner, alpha, limit), layer.w2_weight[expert])
        y = _plus(y, bias_2, expert)
        out_TH.index_add_(0, token, (y * weight_TK[token, slot, None]).to(x_TH.dtype))
    return out_TH


def gated(inner_TF: torch.Tensor, alpha: float | None, limit: float | None) -> torch.Tensor:
    """Returns [tokens, F / 2]: up times the SiLU of gate, which lie one after the other.

    alpha: of gpt-oss, where they take turns: (up + 1) gate sigmoid(alpha gate), both clamped.
    """
    if alpha is None:
        gate, up = inner_TF.chunk(2, dim=-1)
        return functional.silu(gate) * up
    assert limit is not None
    gate, up = inner_TF[..., ::2].clamp(max=limit), inner_TF[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _plus(x_TF: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    """Adds an expert's bias, float32 whatever the model's number format."""
    return x_TF if bias is None else (x_TF + bias[expert]).to(x_TF.dtype)
