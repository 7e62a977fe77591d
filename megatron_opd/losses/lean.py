"""Computes log-probs and entropy from the LM head's input, never holding logits [T, V].

The logits exist one block of rows x ids at a time: forward folds every block into running sums per
row, backward makes it again. That costs one matrix product more than dense logits do, and saves
every [T, V] tensor and the passes over main memory that go with it. Blocks are made by Triton
kernels where there are some for the device (fused.py), else by torch's operations (eager.py), which
are the reference.

Axes: T rows, N (row, id) pairs, H hidden, v this rank's slice of the vocabulary (rank r of a group
holds the ids [r v, (r + 1) v)). One block: C rows, K ids, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_opd.losses.blocks import BlockPlan, default_block
from megatron_opd.losses.eager import EagerPasses
from megatron_opd.losses.fused import can_fuse, fused_passes, shape_of
from megatron_opd.losses.passes import HeadSlice, LogpPasses, RowGradients, Sums, move_maximum


@dataclass(frozen=True)
class LogProbs:
    """Describes softmax(hidden weight^T / temperature), in nats; float32, or float64 as the inputs.

    logp_N: log-prob of each pair. log_normaliser_T: logsumexp of the row. entropy_T: entropy, None
    where it is not wanted.
    """

    logp_N: torch.Tensor
    log_normaliser_T: torch.Tensor
    entropy_T: torch.Tensor | None


class _LeanLogp(torch.autograd.Function):
    """Defines x = hidden weight^T / temperature, p = softmax(x), s = logsumexp(x), H the entropy.

    Gradient with respect to x[t, a], of upstream gradients g_n (log-probs), g_s and g_H:
    sum over n in row t of g_n (1{id_n = a} - p_a) + g_s p_a - g_H p_a (log p_a + H).
    Every rank of the group holds all upstream gradients, because the outputs are all-reduced and
    used alike on each; so the backward pass needs no communication.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        row_N: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        passes: LogpPasses,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        sums = passes.sums(hidden_TH, weight_vH, temperature, entropy=entropy)
        if group is not None:
            sums = _whole(sums, group)
        log_sum_T = sums.sum_T.log()
        logp_N = sums.chosen_N - sums.max_T[row_N] - log_sum_T[row_N]
        logp_N.clamp_(max=0)  # a kernel that adds up H in another order may make x above the max
        normaliser_T = sums.max_T + log_sum_T
        entropy_T = None if sums.moment_T is None else log_sum_T - sums.moment_T / sums.sum_T
        ctx.save_for_backward(hidden_TH, weight_vH, row_N, logp_N, normaliser_T, entropy_T)
        ctx.passes, ctx.temperature = passes, temperature
        ctx.main_grad = getattr(weight_vH, "main_grad", None)
        ctx.signal = getattr(weight_vH, "signals_main_grad", False)
        ctx.set_materialize_grads(False)
        return logp_N, normaliser_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight_vH, row_N, logp_N, normaliser_T, entropy_T = ctx.saved_tensors
        grad_N, grad_normaliser_T, grad_entropy_T = grads
        # grad_x = p (level - slope log p), plus g_n at each pair.
        level_T = torch.zeros_like(normaliser_T)
        if grad_N is not None:
            level_T.index_add_(0, row_N, grad_N.to(level_T.dtype), alpha=-1)
        if grad_normaliser_T is not None:
            level_T += grad_normaliser_T
        if grad_entropy_T is not None:
            level_T -= grad_entropy_T * entropy_T
        rows = RowGradients(
            normaliser_T,
            level_T / ctx.temperature,
            None if grad_entropy_T is None else grad_entropy_T / ctx.temperature,
            None if grad_N is None else grad_N.to(level_T.dtype) / ctx.temperature,
            logp_N,
        )
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_TH = torch.zeros_like(hidden_TH, dtype=level_T.dtype) if needs_hidden else None
        target_vH = None
        if needs_weight:
            target_vH = torch.zeros_like(weight_vH) if ctx.main_grad is None else ctx.main_grad
        ctx.passes.add_gradients(hidden_TH, weight_vH, ctx.temperature, rows, grad_TH, target_vH)
        grad_hidden = None if grad_TH is None else grad_TH.to(hidden_TH.dtype)
        if needs_weight and ctx.main_grad is not None and ctx.signal:
            _tell_added(weight_vH)
        grad_weight = target_vH if ctx.main_grad is None else None
        return grad_hidden, grad_weight, None, None, None, None, None


def _tell_added(weight_vH: Any) -> None:
    """Leave a parameter as Megatron's fused layers do: main_grad has its gradient, and `grad` one.

    Not by returning the gradient: autograd would store a copy of it, [v, H] numbers. Its hooks run
    all the same.
    """
    weight_vH.grad = weight_vH.new_zeros(()).expand(weight_vH.shape)  # one zero, seen v * H times
    weight_vH.grad_added_to_main_grad = True


def _whole(sums: Sums, group: dist.ProcessGroup) -> Sums:
    """Join the sums of all ranks' parts of the vocabulary."""
    above_T = sums.max_T.clone()
    dist.all_reduce(above_T, dist.ReduceOp.MAX, group)
    move_maximum(sums.max_T, sums.sum_T, sums.moment_T, above_T)
    parts = [sums.sum_T, sums.chosen_N, *([] if sums.moment_T is None else [sums.moment_T])]
    joined = torch.cat(parts)
    dist.all_reduce(joined, group=group)
    sum_T, chosen_N, *moment = joined.split([len(part) for part in parts])
    return Sums(sums.max_T, sum_T, moment[0] if moment else None, chosen_N)


def _passes(
    hidden_TH: torch.Tensor,
    head: HeadSlice,
    row_N: torch.Tensor,
    id_N: torch.Tensor,
    block: tuple[int, int] | None,
) -> LogpPasses:
    """Choose how to go over the logits."""
    num_rows = len(hidden_TH)
    if block is None and can_fuse(hidden_TH, head.weight_vH):
        return fused_passes(num_rows, head, row_N, id_N, shape_of(hidden_TH.dtype))
    block = default_block(hidden_TH) if block is None else block
    return EagerPasses(BlockPlan.of(num_rows, head, block, row_N, id_N), len(id_N))


def lean_logp(
    hidden_TH: torch.Tensor,
    head: HeadSlice,
    row_N: torch.Tensor,
    id_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    block: tuple[int, int] | None = None,
    entropy: bool = True,
    passes: LogpPasses | None = None,
) -> LogProbs:
    """Return log softmax(hidden weight^T / temperature) at (row_N, id_N), normaliser and entropy.

    hidden_TH: the LM head's input. head: of the same dtype; every rank of its group must call with
    the same hidden_TH, row_N and id_N and use the results alike.
    row_N, id_N: int64; an id is global, in [0, V); a row may hold any number of pairs, also none.
    block: rows x ids of logits held at a time (two such blocks exist), without kernels; None:
    kernels where there are some, else the device's default. It changes rounding only.
    entropy: whether it is wanted. passes: goes over the logits, in place of what block chooses.
    Differentiable once, in all three results. The sums over the vocabulary are float32, or float64
    for float64 inputs. Raises IndexError for a pair outside the logits.

    The gradient of hidden_TH is the part of this rank's slice of the vocabulary: adding the ranks'
    parts is the work of the region that made hidden_TH (learner/lm_head.py), as it is for
    Megatron's ColumnParallelLinear.

    The weight gradient is added in place to `weight_vH.main_grad` where the parameter has one
    (Megatron's DistributedDataParallel), and autograd sees none for the weight; otherwise it is
    returned. `grad_added_to_main_grad` stays unset, so that DDP's hook still adds what autograd
    brings for this weight from elsewhere: the gradient of the lookup in an embedding tied to it.
    With overlap_grad_reduce that hook also tells when a gradient is complete, and refuses a
    parameter without one: `weight_vH.signals_main_grad` says that nothing else brings one, so that
    `grad` becomes a zero without memory and `grad_added_to_main_grad` is set.
    """
    group = None if head.group is None or head.group.size() == 1 else head.group
    if passes is None:
        passes = _passes(hidden_TH, head, row_N, id_N, block)
    weight_vH = head.weight_vH
    outputs = _LeanLogp.apply(hidden_TH, weight_vH, row_N, temperature, group, passes, entropy)
    return LogProbs(*outputs)  # type: ignore[misc]
