"""A few ids of a distribution and weights, so that sum(weight * f) estimates E_p[f].

The k likeliest ids (atoms) weigh p(id), exactly. m iid draws from what is left (the tail,
renormalised) weigh tail mass / m each. For every f, k >= 0 and m > 0:
E[sum_a weight_a f(a)] = E_p[f]; k = 0 is plain Monte Carlo with weight 1 / m, m = 0 a truncated
top-k, k = V the whole distribution. One rule says what is an atom, and the tail is what remains, so
that no draw is an atom and none is of probability 0.

Pure torch, any device, no device sync. Axes: B rows, V vocabulary, K atoms and M draws (the step's
largest request), S = K + M columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_bridge.server.sampling import Behaviour, draw
from sglang_bridge.server.transfer import to_device

UNUSED = torch.iinfo(torch.int32).max  # of a column without an id; sorts after every id
# A selected id weighs more than 0, also where its probability is below what float32 holds.
LEAST_WEIGHT = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many atoms and draws each row asks for: int64 [B] on the host."""

    atoms_B: np.ndarray
    draws_B: np.ndarray

    @property
    def max_atoms(self) -> int:
        """K, before it is cut to the vocabulary."""
        return int(self.atoms_B.max())

    @property
    def max_draws(self) -> int:
        """M."""
        return int(self.draws_B.max())

    def rows(self, low: int, high: int) -> Wanted:
        """Rows [low, high)."""
        return Wanted(self.atoms_B[low:high], self.draws_B[low:high])

    def to(self, device: torch.device) -> torch.Tensor:
        """int64 [2, B, 1] on the device, by an asynchronous copy."""
        return to_device(np.stack([self.atoms_B, self.draws_B])[..., None], device)


@dataclass(frozen=True, slots=True)
class Selected:
    """What was selected, in no order, equal ids not merged.

    ids_BS: int64, UNUSED where a row has no such atom or draw. weight_BS: float64, > 0 where ids_BS
    is used and 0 elsewhere.
    """

    ids_BS: torch.Tensor
    weight_BS: torch.Tensor


def select(policy: Behaviour, wanted: Wanted, uniform_BM: torch.Tensor) -> Selected:
    """Atoms and tail draws of each row.

    uniform_BM: float64 in [0, 1), M = wanted.max_draws; each number makes one draw.
    """
    probs_BV = policy.probs_BV
    atoms_B1, draws_B1 = wanted.to(probs_BV.device)
    num_atoms = min(wanted.max_atoms, probs_BV.shape[1])
    if num_atoms == 0:
        return _tail_draws(probs_BV, None, draws_B1, uniform_BM)
    total_B1 = probs_BV.sum(-1, keepdim=True, dtype=torch.float64)
    ids_BK, logp_BK = policy.likeliest(num_atoms)
    column_K = torch.arange(num_atoms, device=probs_BV.device)
    is_atom_BK = (column_K < atoms_B1) & (logp_BK > -torch.inf)
    probs_BK = probs_BV.gather(1, ids_BK)
    # The probabilities that make up the tail's mass, not exp(logp): a row then sums to 1.
    atoms = _masked(ids_BK, probs_BK / total_B1, is_atom_BK)
    if wanted.max_draws == 0:
        return atoms
    tail_BV = probs_BV.scatter(1, ids_BK, probs_BK.masked_fill(is_atom_BK, 0.0))
    tail = _tail_draws(tail_BV, total_B1, draws_B1, uniform_BM)
    return Selected(
        torch.cat([atoms.ids_BS, tail.ids_BS], dim=1),
        torch.cat([atoms.weight_BS, tail.weight_BS], dim=1),
    )


def _tail_draws(
    tail_BV: torch.Tensor,
    total_B1: torch.Tensor | None,
    draws_B1: torch.Tensor,
    uniform_BM: torch.Tensor,
) -> Selected:
    """draws_B1 draws from each row of tail_BV, part of a mass of total_B1; None: its own mass.

    The tail's mass is the float64 sum of its own probabilities, not 1 minus that of the atoms: it
    can be 1e-9. A row without mass is not drawn from.
    """
    ids_BM = draw(tail_BV, uniform_BM)
    column_M = torch.arange(ids_BM.shape[1], device=ids_BM.device)
    is_drawn_BM = (column_M < draws_B1) & (tail_BV.gather(1, ids_BM) > 0)
    each_B1 = 1.0 / draws_B1.clamp(min=1).double()
    if total_B1 is not None:
        each_B1 = each_B1 * (tail_BV.sum(-1, keepdim=True, dtype=torch.float64) / total_B1)
    return _masked(ids_BM, each_B1.expand(ids_BM.shape), is_drawn_BM)


def _masked(ids: torch.Tensor, weight: torch.Tensor, used: torch.Tensor) -> Selected:
    """UNUSED and 0 where not `used`; no used weight below LEAST_WEIGHT."""
    weight = weight.double().clamp(min=LEAST_WEIGHT)
    return Selected(ids.masked_fill(~used, UNUSED), weight.masked_fill(~used, 0.0))
