"""Makes the logits in blocks, with torch's own operations: on every device, in every type.

One block: C rows, K ids, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_opd.losses.blocks import Block, BlockPlan, Products, add_product
from megatron_opd.losses.passes import RowGradients, Sums, move_maximum


@dataclass(frozen=True)
class EagerPasses:
    """Makes every block of `plan`, once in a pass. num_pairs: N."""

    plan: BlockPlan
    num_pairs: int

    def sums(
        self,
        hidden_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        temperature: float,
        *,
        entropy: bool,
    ) -> Sums:
        """Compute the sums; see Passes."""
        products = Products(hidden_TH, self.plan)
        # Not -inf: the first correction, (old max - new max) * 0, must be 0.
        lowest = torch.finfo(products.wide).min / 2
        max_T = hidden_TH.new_full((self.plan.num_rows,), lowest, dtype=products.wide)
        sum_T, moment_T = torch.zeros_like(max_T), torch.zeros_like(max_T)
        chosen_N = max_T.new_zeros(self.num_pairs)
        for ids, blocks in self.plan.columns():
            weight_KH = products.operand(weight_vH[ids])
            for block in blocks:
                hidden_CH = products.operand(hidden_TH[block.rows])
                x_CK = products.logits_CK(hidden_CH, weight_KH, temperature, block)
                chosen_N[block.pair_P] = x_CK[block.row_P, block.column_P]
                max_C, sum_C, moment_C = max_T[block.rows], sum_T[block.rows], moment_T[block.rows]
                above_C = torch.maximum(max_C, x_CK.amax(1))
                move_maximum(max_C, sum_C, moment_C if entropy else None, above_C)
                x_CK.sub_(above_C[:, None])
                if not entropy:
                    sum_C += x_CK.exp_().sum(1)
                    continue
                exp_CK = torch.exp(x_CK, out=products.buffer_CK(1, block))
                sum_C += exp_CK.sum(1)
                moment_C += exp_CK.mul_(x_CK).sum(1)
        return Sums(max_T, sum_T, moment_T if entropy else None, chosen_N)

    def add_gradients(
        self,
        hidden_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        temperature: float,
        rows: RowGradients,
        grad_TH: torch.Tensor | None,
        target_vH: torch.Tensor | None,
    ) -> None:
        """Recompute every block and add its part; see Passes.

        A narrower target is written from a buffer of its slice, so that rounding does not depend on
        the number of row blocks.
        """
        products = Products(hidden_TH, self.plan)
        for ids, blocks in self.plan.columns():
            weight_KH = products.operand(weight_vH[ids])
            target_KH, total_KH = None, None
            if target_vH is not None:
                target_KH = total_KH = target_vH[ids]
                if target_vH.dtype != products.wide:
                    total_KH = torch.zeros_like(target_KH, dtype=products.wide)
            for block in blocks:
                hidden_CH = products.operand(hidden_TH[block.rows])
                x_CK = products.logits_CK(hidden_CH, weight_KH, temperature, block)
                grad_CK = _gradient(rows, x_CK, products.buffer_CK(1, block), block)
                if products.native_half:
                    grad_CK = grad_CK.to(hidden_TH.dtype)
                if grad_TH is not None:
                    add_product(grad_TH[block.rows], grad_CK, weight_KH)
                if total_KH is not None:
                    add_product(total_KH, grad_CK.T, hidden_CH)
            if target_KH is not None and total_KH is not None and target_KH is not total_KH:
                target_KH += total_KH


def _gradient(
    rows: RowGradients, x_CK: torch.Tensor, other_CK: torch.Tensor, block: Block
) -> torch.Tensor:
    """Return the gradient's block, in one of the two buffers given; x is overwritten."""
    logp_CK, level_C = x_CK.sub_(rows.normaliser_T[block.rows, None]), rows.level_T[block.rows]
    if rows.slope_T is None:
        grad_CK = logp_CK.exp_().mul_(level_C[:, None])
    else:
        grad_CK = torch.exp(logp_CK, out=other_CK)
        grad_CK *= logp_CK.mul_(-rows.slope_T[block.rows, None]).add_(level_C[:, None])
    if rows.pair_N is not None:
        pair_P = rows.pair_N[block.pair_P]
        # Not index_put_, which on CUDA sorts the block's pairs to add up those of one place.
        place_P = block.row_P * grad_CK.shape[1] + block.column_P
        grad_CK.view(-1).index_add_(0, place_P, pair_P)
    return grad_CK
