"""Names what both ways of the lean log-prob operation compute: in blocks, or in fused kernels.

Axes: T rows, N (row, id) pairs, H hidden, v this rank's slice of the vocabulary. x are the logits
hidden weight^T / temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class HeadSlice:
    """Holds this rank's slice of an LM head whose vocabulary a group of ranks shares.

    weight_vH: rank r of the group holds the ids [r v, (r + 1) v). group: None for one rank.
    vocab_size: V, where the slices pad it: rows of the last weights that are no ids are never read,
    and get no gradient. None: v a rank.
    """

    weight_vH: torch.Tensor
    group: dist.ProcessGroup | None = None
    vocab_size: int | None = None

    @property
    def first_id(self) -> int:
        """Returns the first id of this rank."""
        return 0 if self.group is None else self.group.rank() * len(self.weight_vH)

    @property
    def total(self) -> int:
        """Returns how many ids the whole vocabulary has, V."""
        if self.vocab_size is not None:
            return self.vocab_size
        return len(self.weight_vH) * (1 if self.group is None else self.group.size())

    @property
    def num_ids(self) -> int:
        """Returns how many ids this rank has."""
        return min(max(self.total - self.first_id, 0), len(self.weight_vH))


@dataclass(frozen=True)
class Sums:
    """Holds sums over this rank's ids of each row, and x of its pairs.

    max_T of x; sum_T of exp(x - max); moment_T, the sum of exp(x - max) (x - max), None where no
    entropy is wanted; chosen_N, x of each pair, 0 for those of other ranks.
    """

    max_T: torch.Tensor
    sum_T: torch.Tensor
    moment_T: torch.Tensor | None
    chosen_N: torch.Tensor


@dataclass(frozen=True)
class RowGradients:
    """Holds x's gradient in terms of p = softmax(x), by row.

    It is p (level - slope log p), and pair_N added at pairs; no slope is 0. logp_N: log p of pairs.
    """

    normaliser_T: torch.Tensor
    level_T: torch.Tensor
    slope_T: torch.Tensor | None
    pair_N: torch.Tensor | None
    logp_N: torch.Tensor


def move_maximum(
    max_C: torch.Tensor, sum_C: torch.Tensor, moment_C: torch.Tensor | None, above_C: torch.Tensor
) -> None:
    """Rewrite the sums, in place, relative to a larger maximum."""
    down_C = max_C - above_C
    shrink_C = down_C.exp()
    if moment_C is not None:
        moment_C.addcmul_(sum_C, down_C).mul_(shrink_C)
    sum_C.mul_(shrink_C)
    max_C.copy_(above_C)


class LogpPasses(Protocol):
    """Makes the logits of hidden_TH [T, H] and weight_vH [v, H], anew in every pass."""

    def sums(
        self,
        hidden_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        temperature: float,
        *,
        entropy: bool,
    ) -> Sums:
        """Compute the sums. entropy: also the moment."""
        ...

    def add_gradients(
        self,
        hidden_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        temperature: float,
        rows: RowGradients,
        grad_TH: torch.Tensor | None,
        target_vH: torch.Tensor | None,
    ) -> None:
        """Add x's gradient, times the other operand, to both targets in place; None: not wanted.

        A target in a narrower type than the sums' is written once a slice of the vocabulary.
        """
        ...
