"""TransformerEngine's functions for experts computed by torch: choice, permutation, its inverse.

With the arguments that Megatron gives, and the results that their documentation says.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

from checks.gpu_ready.calls import counted


def _permute(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy each token to each of its experts, expert by expert. Returns tokens, weights, map."""
    expert, token = routing_map.bool().t().nonzero(as_tuple=True)
    assert num_out_tokens == len(token), (num_out_tokens, len(token))
    return inp.index_select(0, token), probs[token, expert], token


def _unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add up what the experts made of each token."""
    assert merging_probs is None
    assert pad_offsets is None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def _sort_chunks(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    order, sizes = sorted_index.tolist(), split_sizes.tolist()
    tokens, weights = inp.split(sizes), probs.split(sizes)
    return torch.cat([tokens[i] for i in order]), torch.cat([weights[i] for i in order])


def _sort_chunks_alone(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def chosen(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts. Returns their weights, [tokens, experts], and where they are."""
    assert score_function == "softmax"
    assert num_groups is group_topk is scaling_factor is expert_bias is None
    scores = logits.softmax(-1, dtype=torch.float32) if use_pre_softmax else logits.float()
    values, experts = scores.topk(topk, 1)
    weights = values if use_pre_softmax else values.softmax(-1)
    probs = torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype))
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)


def _scores(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a balancing loss reads. Returns where the chosen experts are, and all weights."""
    assert score_function == "softmax"
    _, places = chosen(logits, topk, use_pre_softmax=True)
    return places, logits.softmax(-1, dtype=torch.float32)


def _balancing_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    products = probs.sum(0) * tokens_per_expert
    return products.sum() * (num_experts * coeff / (topk * total_num_tokens * total_num_tokens))


def install() -> None:
    """Put them in place, in this process."""
    held: Any = moe_utils
    held.te_general_gemm = None
    held.fused_permute_with_probs = counted("permute", _permute)
    held.fused_unpermute = counted("unpermute", _unpermute)
    held.fused_sort_chunks_by_index_with_probs = counted("sort_chunks", _sort_chunks)
    held.fused_sort_chunks_by_index = counted("sort_chunks", _sort_chunks_alone)
    held.fused_topk_with_score_function = counted("router", chosen)
    held.fused_compute_score_for_moe_aux_loss = counted("router_scores", _scores)
    held.fused_moe_aux_loss = counted("balancing_loss", _balancing_loss)
