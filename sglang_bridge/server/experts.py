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
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Sums this rank's experts alone: moe_forward_native, with other ranks' experts as id -1.

    x_TH: [tokens, hidden]. The ranks' results are added by the caller's all-reduce. SiLU-gated
    experts without biases only (Qwen3-MoE); used on CPU, where the fused kernels do not exist.
    """
    weight_TK, expert_TK, _ = topk_output
    if not (expert_TK < 0).any():
        return original(layer, x_TH, topk_output, *args, **kwargs)
    out_TH = torch.zeros_like(x_TH)
    for expert in range(layer.w13_weight.shape[0]):
        token, slot = (expert_TK == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        gate, up = functional.linear(x_TH[token], layer.w13_weight[expert]).chunk(2, dim=-1)
        y = functional.linear(functional.silu(gate) * up, layer.w2_weight[expert])
        out_TH.index_add_(0, token, (y * weight_TK[token, slot, None]).to(x_TH.dtype))
    return out_TH
