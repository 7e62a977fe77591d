"""Turns one step's selected ids into ragged rows: distinct ids, weights of equal ids added.

No device sync. Axes: B rows, S selected columns, F forced ids, R = S + F columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_bridge.server.selection import UNUSED, Selected


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Holds rows of distinct ids.

    ids_BR: int64, strictly increasing in the first length_B columns, UNUSED after. weight_BR:
    float32, 0 for a forced id that was not selected. logp_BR: float32, without meaning in unused
    columns. length_B: int64, 0..R.
    """

    ids_BR: torch.Tensor
    weight_BR: torch.Tensor
    logp_BR: torch.Tensor
    length_B: torch.Tensor

    def column_of(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Returns int64 [B]: where in its row each of these forced ids stands."""
        return (self.ids_BR < ids_B[:, None]).sum(1)


def forced(ids_BF: torch.Tensor, logp_BF: torch.Tensor) -> Selected:
    """Makes ids that a row holds whether they are selected or not, with weight 0."""
    return Selected(ids_BF, torch.zeros_like(ids_BF, dtype=torch.float64), logp_BF)


def build_rows(*parts: Selected) -> LogitRows:
    """Makes a row of all that the parts hold of it.

    Log-probs of one id differ by rounding alone; the largest is taken.
    """
    ids_BR, order_BR = torch.cat([part.ids_BS for part in parts], dim=1).sort(dim=1)
    weight_BR = torch.cat([part.weight_BS for part in parts], dim=1).gather(1, order_BR)
    logp_BR = torch.cat([part.logp_BS for part in parts], dim=1).gather(1, order_BR)
    new_BR = torch.ones_like(ids_BR, dtype=torch.bool)
    new_BR[:, 1:] = ids_BR[:, 1:] != ids_BR[:, :-1]
    slot_BR = new_BR.cumsum(1) - 1
    distinct_BR = torch.full_like(ids_BR, UNUSED).scatter_(1, slot_BR, ids_BR)
    sums_BR = torch.zeros_like(weight_BR).scatter_add_(1, slot_BR, weight_BR)
    best_BR = torch.full_like(logp_BR, -torch.inf).scatter_reduce_(1, slot_BR, logp_BR, "amax")
    return LogitRows(distinct_BR, sums_BR.float(), best_BR, (distinct_BR != UNUSED).sum(1))
