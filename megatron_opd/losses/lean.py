"""Computes log-probs and entropy from the LM head's input, never holding logits [T, V].

The logits exist one block of rows x ids at a time: forward folds every block into running sums per
row, backward makes it again. That costs one matrix product more than dense logits do, and saves
every [T, V] tensor and the passes over main memory that go with it.

Axes: T rows, N (row, id) pairs, H hidden, v this rank's slice of the vocabulary (rank r of a group
holds the ids [r v, (r + 1) v)). One block: C rows, K ids, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_opd.losses.blocks import Block, BlockPlan, Products, default_block


@dataclass(frozen=True)
class LogProbs:
    """Describes softmax(hidden weight^T / temperature), in nats; float32, or float64 as the inputs.

    logp_N: log-prob of each pair. log_normaliser_T: logsumexp of the row. entropy_T: entropy.
    """

    logp_N: torch.Tensor
    log_normaliser_T: torch.Tensor
    entropy_T: torch.Tensor


def _sums(
    hidden_TH: torch.Tensor,
    weight_vH: torch.Tensor,
    plan: BlockPlan,
    temperature: float,
    num_pairs: int,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute sums per row of x = hidden weight^T / temperature over the group's vocabulary.

    max_T of x; sum_T of exp(x - max); moment_T, the sum of exp(x - max) (x - max); chosen_N, x of
    each pair.
    """
    products = Products(hidden_TH, plan)
    # Not -inf: the first correction, (old max - new max) * 0, must be 0.
    lowest = torch.finfo(products.wide).min / 2
    max_T = hidden_TH.new_full((plan.num_rows,), lowest, dtype=products.wide)
    sum_T, moment_T = torch.zeros_like(max_T), torch.zeros_like(max_T)
    chosen_N = max_T.new_zeros(num_pairs)
    for ids, blocks in plan.columns():
        weight_KH = products.operand(weight_vH[ids])
        for block in blocks:
            hidden_CH = products.operand(hidden_TH[block.rows])
            x_CK = products.logits_CK(hidden_CH, weight_KH, temperature, block)
            chosen_N[block.pair_P] = x_CK[block.row_P, block.column_P]
            max_C, sum_C, moment_C = max_T[block.rows], sum_T[block.rows], moment_T[block.rows]
            above_C = torch.maximum(max_C, x_CK.amax(1))
            _move_maximum(max_C, sum_C, moment_C, above_C)
            x_CK.sub_(above_C[:, None])
            exp_CK = torch.exp(x_CK, out=products.buffer_CK(1, block))
            sum_C += exp_CK.sum(1)
            moment_C += exp_CK.mul_(x_CK).sum(1)
    if group is not None:
        above_T = max_T.clone()
        dist.all_reduce(above_T, dist.ReduceOp.MAX, group)
        _move_maximum(max_T, sum_T, moment_T, above_T)
        sums = torch.cat([sum_T, moment_T, chosen_N])
        dist.all_reduce(sums, group=group)
        sum_T, moment_T, chosen_N = sums.split([plan.num_rows, plan.num_rows, num_pairs])
    return max_T, sum_T, moment_T, chosen_N


def _move_maximum(
    max_C: torch.Tensor, sum_C: torch.Tensor, moment_C: torch.Tensor, above_C: torch.Tensor
) -> None:
    """Rewrite the sums, in place, relative to a larger maximum."""
    down_C = max_C - above_C
    shrink_C = down_C.exp()
    moment_C.addcmul_(sum_C, down_C).mul_(shrink_C)
    sum_C.mul_(shrink_C)
    max_C.copy_(above_C)


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
        id_N: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        block: tuple[int, int],
        vocab_size: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = len(hidden_TH), len(weight_vH)
        plan = BlockPlan.of(shape, block, row_N, id_N, group, vocab_size)
        max_T, sum_T, moment_T, chosen_N = _sums(
            hidden_TH, weight_vH, plan, temperature, len(id_N), group
        )
        log_sum_T = sum_T.log()
        logp_N = chosen_N - max_T[row_N] - log_sum_T[row_N]
        normaliser_T = max_T + log_sum_T
        entropy_T = log_sum_T - moment_T / sum_T
        ctx.save_for_backward(hidden_TH, weight_vH, row_N, normaliser_T, entropy_T)
        ctx.plan, ctx.temperature = plan, temperature
        ctx.main_grad = getattr(weight_vH, "main_grad", None)
        ctx.signal = getattr(weight_vH, "signals_main_grad", False)
        ctx.set_materialize_grads(False)
        return logp_N, normaliser_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight_vH, row_N, normaliser_T, entropy_T = ctx.saved_tensors
        grad_N, grad_normaliser_T, grad_entropy_T = grads
        # grad_x = p (level - slope log p), plus g_n at each pair.
        level_T = torch.zeros_like(normaliser_T)
        if grad_N is not None:
            level_T.index_add_(0, row_N, grad_N.to(level_T.dtype), alpha=-1)
        if grad_normaliser_T is not None:
            level_T += grad_normaliser_T
        if grad_entropy_T is not None:
            level_T -= grad_entropy_T * entropy_T
        rows = _RowGradients(
            normaliser_T,
            level_T / ctx.temperature,
            None if grad_entropy_T is None else grad_entropy_T / ctx.temperature,
            None if grad_N is None else grad_N.to(level_T.dtype) / ctx.temperature,
        )
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_TH = torch.zeros_like(hidden_TH, dtype=level_T.dtype) if needs_hidden else None
        target_vH = None
        if needs_weight:
            target_vH = torch.zeros_like(weight_vH) if ctx.main_grad is None else ctx.main_grad
        _accumulate(hidden_TH, weight_vH, ctx.plan, ctx.temperature, rows, grad_TH, target_vH)
        grad_hidden = None if grad_TH is None else grad_TH.to(hidden_TH.dtype)
        grad_weight = target_vH
        if ctx.main_grad is not None:
            # No memory of its own: one zero, seen v * H times.
            zeros = weight_vH.new_zeros(()).expand(weight_vH.shape) if ctx.signal else None
            grad_weight = zeros
        return grad_hidden, grad_weight, None, None, None, None, None, None


@dataclass(frozen=True)
class _RowGradients:
    """Holds x's gradient in terms of p, by row: p (level - slope log p), and pair_N at pairs."""

    normaliser_T: torch.Tensor
    level_T: torch.Tensor
    slope_T: torch.Tensor | None
    pair_N: torch.Tensor | None

    def of_block(self, x_CK: torch.Tensor, other_CK: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the gradient's block, in one of the two buffers given; x is overwritten."""
        logp_CK, level_C = x_CK.sub_(self.normaliser_T[block.rows, None]), self.level_T[block.rows]
        if self.slope_T is None:
            grad_CK = logp_CK.exp_().mul_(level_C[:, None])
        else:
            grad_CK = torch.exp(logp_CK, out=other_CK)
            grad_CK *= logp_CK.mul_(-self.slope_T[block.rows, None]).add_(level_C[:, None])
        if self.pair_N is not None:
            pair_P = self.pair_N[block.pair_P]
            grad_CK.index_put_((block.row_P, block.column_P), pair_P, accumulate=True)
        return grad_CK


def _accumulate(
    hidden_TH: torch.Tensor,
    weight_vH: torch.Tensor,
    plan: BlockPlan,
    temperature: float,
    rows: _RowGradients,
    grad_TH: torch.Tensor | None,
    target_vH: torch.Tensor | None,
) -> None:
    """Recompute every block and add its part to both gradients, in place; None: not wanted.

    A target in a narrower type than the sums' is written once a slice of the vocabulary, from a
    buffer of that slice, so that rounding does not depend on the number of row blocks.
    """
    products = Products(hidden_TH, plan)
    for ids, blocks in plan.columns():
        weight_KH = products.operand(weight_vH[ids])
        target_KH, total_KH = None, None
        if target_vH is not None:
            target_KH = total_KH = target_vH[ids]
            if target_vH.dtype != products.wide:
                total_KH = torch.zeros_like(target_KH, dtype=products.wide)
        for block in blocks:
            hidden_CH = products.operand(hidden_TH[block.rows])
            x_CK = products.logits_CK(hidden_CH, weight_KH, temperature, block)
            grad_CK = rows.of_block(x_CK, products.buffer_CK(1, block), block)
            if products.native_half:
                grad_CK = grad_CK.to(hidden_TH.dtype)
            if grad_TH is not None:
                products.add(grad_TH[block.rows], grad_CK, weight_KH)
            if total_KH is not None:
                products.add(total_KH, grad_CK.T, hidden_CH)
        if target_KH is not None and total_KH is not None and target_KH is not total_KH:
            target_KH += total_KH


def lean_logp(
    hidden_TH: torch.Tensor,
    weight_vH: torch.Tensor,
    row_N: torch.Tensor,
    id_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    block: tuple[int, int] | None = None,
    vocab_size: int | None = None,
) -> LogProbs:
    """Return log softmax(hidden weight^T / temperature) at (row_N, id_N), normaliser and entropy.

    hidden_TH: the LM head's input; weight_vH: this rank's slice of the head, of the same dtype.
    row_N, id_N: int64; an id is global, in [0, V); a row may hold any number of pairs, also none.
    group: the ranks that share the vocabulary, None for one; every rank must call with the same
    hidden_TH, row_N and id_N and use the results alike. block: rows x ids of logits held at a time
    (two such blocks exist), None for the device's default; it changes rounding only.
    vocab_size: V, where the ranks' slices pad it: rows of the last weights that are no ids are
    never read, and get no gradient. None: v a rank.
    Differentiable once, in all three results. The sums over the vocabulary are float32, or float64
    for float64 inputs. Raises IndexError for a pair outside the logits.

    The gradient of hidden_TH is the part of this rank's slice of the vocabulary: adding the ranks'
    parts is the work of the region that made hidden_TH (learner/lm_head.py), as it is for
    Megatron's ColumnParallelLinear.

    The weight gradient is added in place to `weight_vH.main_grad` where the parameter has one
    (Megatron's DistributedDataParallel), and autograd sees none for the weight; otherwise it is
    returned. `grad_added_to_main_grad` stays unset, so that DDP's hook still adds what autograd
    brings for this weight from elsewhere: the gradient of the lookup in an embedding tied to it.
    With overlap_grad_reduce that hook also tells when a gradient is complete, and must be called
    for every parameter: where `weight_vH.signals_main_grad` is true, autograd brings it a zero.
    """
    if group is not None and group.size() == 1:
        group = None
    block = default_block(hidden_TH) if block is None else block
    outputs = _LeanLogp.apply(
        hidden_TH, weight_vH, row_N, id_N, temperature, group, block, vocab_size
    )
    return LogProbs(*outputs)  # type: ignore[misc]
