"""Gathers log-probs of chosen ids from vocabulary-sharded logits, with an exact gradient.

Axes: T rows of logits, N (row, id) pairs, v this rank's slice of the vocabulary: rank r of a group
of size G holds the ids [r v, (r + 1) v).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _GatherLogp(torch.autograd.Function):
    """Computes logp_n = x[row_n, id_n] / tau - logsumexp_V(x[row_n] / tau).

    Gradient with respect to x[t, a]: (sum over n in row t of g_n (1{id_n = a} - p(a))) / tau. Every
    rank of the group holds all of g, because logp is all-reduced and used alike on each; so the
    backward pass needs no communication, and adding an all-reduce would count it G times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: torch.Tensor,
        row_N: torch.Tensor,
        id_N: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        wide = logits_Tv.dtype if logits_Tv.dtype == torch.float64 else torch.float32
        x_Tv = logits_Tv.to(wide) / temperature
        max_T = x_Tv.amax(dim=1)
        if group is not None:
            dist.all_reduce(max_T, dist.ReduceOp.MAX, group)
        x_Tv.sub_(max_T[:, None])  # a copy already: the division made it
        first = 0 if group is None else group.rank() * x_Tv.shape[1]
        local_N = id_N - first
        owned_N = (local_N >= 0) & (local_N < x_Tv.shape[1])
        local_N = torch.where(owned_N, local_N, 0)
        chosen_N = torch.where(owned_N, x_Tv[row_N, local_N], 0)
        exp_Tv = x_Tv.exp_()
        sum_T = exp_Tv.sum(dim=1)
        if group is not None:
            dist.all_reduce(sum_T, group=group)
            dist.all_reduce(chosen_N, group=group)
        probs_Tv = exp_Tv.div_(sum_T[:, None])
        ctx.save_for_backward(probs_Tv, row_N, local_N, owned_N)
        ctx.temperature, ctx.dtype = temperature, logits_Tv.dtype
        return chosen_N - sum_T.log()[row_N]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad_N,) = grads
        probs_Tv, row_N, local_N, owned_N = ctx.saved_tensors
        grad_T = grad_N.new_zeros(probs_Tv.shape[0]).index_add_(0, row_N, grad_N)
        grad_Tv = probs_Tv * -grad_T[:, None]
        # Not index_put_, which on CUDA sorts all pairs to add up those of one place.
        place_N = row_N * grad_Tv.shape[1] + local_N
        grad_Tv.view(-1).index_add_(0, place_N, torch.where(owned_N, grad_N, 0))
        return grad_Tv.div_(ctx.temperature).to(ctx.dtype), None, None, None, None


def gather_logp(
    logits_Tv: torch.Tensor,
    row_N: torch.Tensor,
    id_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return [N] log softmax(logits / temperature) at (row_N, id_N).

    In float32, or float64 for float64 logits.
    row_N, id_N: int64; an id is global, in [0, V). group: the ranks that share the vocabulary, None
    for one. Every rank of the group must call it with the same row_N and id_N and use the result
    alike.
    """
    if group is not None and group.size() == 1:
        group = None
    return _GatherLogp.apply(logits_Tv, row_N, id_N, temperature, group)  # type: ignore[no-any-return]
