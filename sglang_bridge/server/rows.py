"""Turns one step's selected ids into ragged rows: distinct ids, weights of equal ids added.

No device sync. Axes: B rows, S selected columns, F forced ids, R = S + F columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_bridge.server.sampling import Behaviour
from sglang_bridge.server.selection import UNUSED, Selected


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds rows of distinct ids.

    ids_BR: int64, strictly increasing in the first length_B columns, UNUSED after. weight_BR:
    float32, 0 for a forced id that was not selected. length_B: int64, 0..R.
    """

    ids_BR: torch.Tensor
    weight_BR: torch.Tensor
    length_B: torch.Tensor

    def column_of(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Returns int64 [B]: where in its row each of these forced ids stands."""
        return (self.ids_BR < ids_B[:, None]).sum(1)

    def logp(self, policy: Behaviour) -> torch.Tensor:
        """Returns float32 [B, R]: log-probs of the ids; without meaning in unused columns."""
        return policy.gather(self.ids_BR.clamp(max=policy.logp_BV.shape[1] - 1))


def build_rows(selected: Selected, forced_BF: torch.Tensor | None = None) -> Rows:
    """Makes a row per row of `selected`; forced_BF: int64 ids that every row holds regardless."""
    ids_BR, weight_BR = selected.ids_BS, selected.weight_BS
    if forced_BF is not None:
        ids_BR = torch.cat([ids_BR, forced_BF], dim=1)
        weight_BR = torch.nn.functional.pad(weight_BR, (0, forced_BF.shape[1]))
    ids_BR, order_BR = ids_BR.sort(dim=1)
    new_BR = torch.ones_like(ids_BR, dtype=torch.bool)
    new_BR[:, 1:] = ids_BR[:, 1:] != ids_BR[:, :-1]
    slot_BR = new_BR.cumsum(1) - 1
    distinct_BR = torch.full_like(ids_BR, UNUSED).scatter_(1, slot_BR, ids_BR)
    sums_BR = torch.zeros_like(weight_BR).scatter_add_(1, slot_BR, weight_BR.gather(1, order_BR))
    return Rows(distinct_BR, sums_BR.float(), (distinct_BR != UNUSED).sum(1))
