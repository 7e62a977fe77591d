"""Computes norms of queries and keys over the heads of all ranks, as MiniMax-M2 has them.

SGLang 0.5.23 computes them by Triton kernels, which a CPU lacks; on a GPU nothing is replaced.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

MODEL = "sglang.srt.models.minimax_m2"
NORM = "MiniMaxM2RMSNormTP"
"""Name of the class of such a norm, of which a rank holds the weights of its heads."""


def first(norm: Any) -> int:
    """Return which of all heads' features the norm of this rank begins with."""
    return norm.attn_tp_rank // norm.num_head_replicas * len(norm.weight)


def answer_in_torch() -> None:
    """Puts this file's functions where SGLang looks for Triton's; call once a model is loaded.

    Nothing happens where no MiniMax was imported. RuntimeError: SGLang no longer has a name that is
    replaced here.
    """
    model = sys.modules.get(MODEL)
    if model is None:
        return
    for name, function in replaced().items():
        if name not in vars(model):
            raise RuntimeError(f"{MODEL} has no {name}, which a CPU needs in torch")
        setattr(model, name, function)


def replaced() -> dict[str, Any]:
    """Return what is replaced, by name."""
    return {"rms_sumsq_serial": sum_squares, "rms_apply_serial": normalise}


def sum_squares(q_TN: torch.Tensor, k_TN: torch.Tensor) -> torch.Tensor:
    """Return [2T] float32: each row's squares of q, then of k, summed, which ranks then add up."""
    return torch.cat([x_TN.float().square().sum(-1) for x_TN in (q_TN, k_TN)])


def normalise(
    q_TN: torch.Tensor,
    k_TN: torch.Tensor,
    weight_q: torch.Tensor,
    weight_k: torch.Tensor,
    squares: torch.Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k over the root mean square of all ranks' heads, times the weights.

    squares: all ranks' sum of what sum_squares returns.
    """
    parts = zip((q_TN, k_TN), (weight_q, weight_k), squares.chunk(2), strict=True)
    normed = [
        (x.float() * torch.rsqrt(sums / (x.shape[1] * ranks) + eps)[:, None] * weight).to(x.dtype)
        for x, weight, sums in parts
    ]
    return normed[0], normed[1]
