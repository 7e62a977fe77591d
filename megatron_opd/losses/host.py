"""Keeps on the host what decides which pairs a loss reads, so that nothing waits for the device.

Which responses a term reads, and which of their pairs, follows from the batch alone. Asking the
device for it (a mask as an index, `nonzero`, `bool`) would wait for all work queued there, once a
question. The same answer from numpy costs a copy that the device makes when it gets there.

Axes: T sampled tokens, N (token, cached action) pairs, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class HostColumns:
    """Holds those columns of losses.cache.Unscored that choose what is read, and what is chosen.

    row_N, path_T, sample_T: as there. chosen_N: the pairs that the support selected and the teacher
    does not exclude. reward_weight_B, teacher_weight_B, imitation_weight_B, share_B: see
    columns.GroupColumns.
    """

    row_N: Index
    path_T: Index
    sample_T: Index
    chosen_N: Bools
    reward_weight_B: npt.NDArray[np.float64]
    teacher_weight_B: npt.NDArray[np.float64]
    imitation_weight_B: npt.NDArray[np.float64]
    share_B: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls, columns: Mapping[str, npt.NDArray[Any]], row_N: Index, path_T: Index, sample_T: Index
    ) -> Self:
        """Take what chooses from the columns of a batch; NaN scores are chosen (Cache.selected)."""
        return cls(
            row_N=row_N,
            path_T=path_T,
            sample_T=sample_T,
            chosen_N=(columns["weight_N"] > 0) & (columns["teacher_logp_N"] != -np.inf),
            reward_weight_B=columns["reward_weight_B"],
            teacher_weight_B=columns["teacher_weight_B"],
            imitation_weight_B=columns["imitation_weight_B"],
            share_B=columns["share_B"],
        )

    @property
    def imitated_T(self) -> Bools:
        """Returns which tokens the teacher wrote: they have no sampler's log-prob."""
        return self.imitation_weight_B[self.sample_T] > 0

    def part(self, kept_B: Bools) -> tuple[dict[str, Index], HostColumns]:
        """Return the places of these responses by axis (B, T, N), and their own columns."""
        kept_T = kept_B[self.sample_T]
        kept_N = kept_T[self.row_N]
        places = {
            axis: np.flatnonzero(kept)
            for axis, kept in (("B", kept_B), ("T", kept_T), ("N", kept_N))
        }
        response_B, row_T, pair_N = (np.cumsum(kept) - 1 for kept in (kept_B, kept_T, kept_N))
        return places, HostColumns(
            row_N=row_T[self.row_N[kept_N]],
            path_T=pair_N[self.path_T[kept_T]],
            sample_T=response_B[self.sample_T[kept_T]],
            chosen_N=self.chosen_N[kept_N],
            reward_weight_B=self.reward_weight_B[kept_B],
            teacher_weight_B=self.teacher_weight_B[kept_B],
            imitation_weight_B=self.imitation_weight_B[kept_B],
            share_B=self.share_B[kept_B],
        )


def sent(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device, without waiting for the copy.

    A plain copy to a GPU ends when all work queued there has. From pinned memory it is one more
    piece of that work; torch keeps the memory until it is done.
    """
    tensor = torch.as_tensor(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
