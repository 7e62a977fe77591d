"""Draws of one step to ragged rows: sorted distinct ids with counts, the path token among them.

No device sync. Axes: B requests, M draws, R = M + 1 columns (a row has at most M distinct draws and
the path token).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNUSED = torch.iinfo(torch.int32).max  # sorts after every id


@dataclass(frozen=True, slots=True)
class DedupedRows:
    """Deduplicated rows.

    ids_BR: int64, strictly increasing in the first length_B columns, UNUSED after. count_BR: uint8.
    path_B: uint8, the column of the path token. length_B: uint8, 1..R.
    """

    ids_BR: torch.Tensor
    count_BR: torch.Tensor
    path_B: torch.Tensor
    length_B: torch.Tensor


def dedup(ids_BM: torch.Tensor, num_draws_B: torch.Tensor, path_B: torch.Tensor) -> DedupedRows:
    """Counts equal ids among the first num_draws_B of each row; adds path_B with count 0."""
    column_M = torch.arange(ids_BM.shape[1], device=ids_BM.device)
    drawn_BM = column_M[None, :] < num_draws_B[:, None]
    used_BM = ids_BM.masked_fill(~drawn_BM, UNUSED)
    path_B = path_B.to(torch.int64)
    # The lowest bit tells a draw from the path token, so that one sort carries both.
    key_BR = torch.cat([used_BM * 2 + drawn_BM, path_B[:, None] * 2], dim=1).sort(dim=1).values
    id_BR, is_draw_BR = key_BR >> 1, key_BR & 1
    new_BR = torch.ones_like(id_BR, dtype=torch.bool)
    new_BR[:, 1:] = id_BR[:, 1:] != id_BR[:, :-1]
    slot_BR = new_BR.cumsum(1) - 1
    ids_BR = torch.full_like(id_BR, UNUSED).scatter_(1, slot_BR, id_BR)
    count_BR = torch.zeros_like(id_BR).scatter_add_(1, slot_BR, is_draw_BR)
    return DedupedRows(
        ids_BR=ids_BR,
        count_BR=count_BR.to(torch.uint8),
        path_B=(ids_BR < path_B[:, None]).sum(1).to(torch.uint8),
        length_B=(ids_BR != UNUSED).sum(1).to(torch.uint8),
    )
