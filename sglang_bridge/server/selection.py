"""Selects a few ids of a distribution and weights, so that sum(weight * f) estimates E_p[f].

The k likeliest ids (atoms) weigh p(id), exactly. m iid draws from what is left (the tail,
renormalised) weigh tail mass / m each. For every f, k >= 0 and m > 0:
E[sum_a weight_a f(a)] = E_p[f]; k = 0 is plain Monte Carlo with weight 1 / m, m = 0 a truncated
top-k, k = V the whole distribution. One rule says what is an atom, and the tail is what remains,
so that no draw is an atom and none is of probability 0.

Thin rows make only ceil(m tail mass) draws. A peaked row then holds few ids, and the variance of
any sum(weight * f) is still never above that of m draws of plain Monte Carlo: it is tail^2 Var_tail
/ draws <= tail Var_tail / m, and Var >= tail Var_tail.

Pure torch, any device, no device sync. Axes: B rows, V vocabulary, K atoms and M draws (the step's
largest request), S = K + M columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_bridge.server.inversion import draw
from sglang_bridge.server.masses import LOWEST, Masses, below_top, masses_of
from sglang_bridge.server.sampling import Behaviour
from sglang_bridge.server.transfer import to_device

UNUSED = torch.iinfo(torch.int32).max  # marks a column without an id; sorts after every id
# A selected id weighs more than 0, also where its probability is below what float32 holds.
LEAST_WEIGHT = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Wanted:
    """Says how many atoms and draws each row asks for: int64 [B] on the host.

    thin_B: bool [B]; None = no row is thin.
    """

    atoms_B: np.ndarray
    draws_B: np.ndarray
    thin_B: np.ndarray | None = None

    @property
    def max_atoms(self) -> int:
        """Returns K, the largest number of atoms, before it is cut to the vocabulary."""
        return int(self.atoms_B.max())

    @property
    def max_draws(self) -> int:
        """Returns M, the largest number of draws."""
        return int(self.draws_B.max())

    def rows(self, low: int, high: int) -> Wanted:
        """Returns rows [low, high)."""
        thin_B = None if self.thin_B is None else self.thin_B[low:high]
        return Wanted(self.atoms_B[low:high], self.draws_B[low:high], thin_B)

    def to(self, device: torch.device) -> torch.Tensor:
        """Returns int64 [3, B, 1] on the device, by an asynchronous copy."""
        thin_B = np.zeros_like(self.atoms_B) if self.thin_B is None else self.thin_B
        columns = np.stack([self.atoms_B, self.draws_B, thin_B.astype(np.int64)])
        return to_device(columns[..., None], device)

    @property
    def any_thin(self) -> bool:
        """Returns whether some row is thin."""
        return self.thin_B is not None and bool(self.thin_B.any())


@dataclass(frozen=True, slots=True)
class Selected:
    """Holds what was selected, in no order, equal ids not merged.

    ids_BS: int64, UNUSED where a row has no such atom or draw. weight_BS: float64, > 0 where ids_BS
    is used and 0 elsewhere. logp_BS: float32, without meaning in unused columns.
    """

    ids_BS: torch.Tensor
    weight_BS: torch.Tensor
    logp_BS: torch.Tensor


def select(
    policy: Behaviour, wanted: Wanted, uniform_BM: torch.Tensor, masses: Masses | None = None
) -> Selected:
    """Selects atoms and tail draws of each row.

    uniform_BM: float64 in [0, 1), M = wanted.max_draws; each number makes one draw. masses: the
    policy's, where they are known.
    """
    logits_BV = policy.logits_BV
    if wanted.max_atoms == wanted.max_draws == 0:  # paths only: nothing is to be summed
        nothing = torch.empty((len(logits_BV), 0), dtype=torch.int64, device=logits_BV.device)
        return Selected(nothing, nothing.double(), nothing.float())
    atoms_B1, draws_B1, thin_B1 = wanted.to(logits_BV.device)
    if wanted.max_atoms == 0:  # plain Monte Carlo pays for no top-k
        masses = masses_of(policy) if masses is None else masses
        ids_BM = draw(policy, masses, uniform_BM)
        weight_B1 = draws_B1.clamp(min=1).double().reciprocal()
        logp_BM = masses.norm.logp(logits_BV.gather(1, ids_BM))
        return _masked(ids_BM, weight_B1, logp_BM, _columns(ids_BM) < draws_B1)
    ids_BK, logits_BK = policy.likeliest(min(wanted.max_atoms, logits_BV.shape[1]))
    is_atom_BK = (_columns(ids_BK) < atoms_B1) & (logits_BK > -torch.inf)
    with policy.without(ids_BK, logits_BK, is_atom_BK):
        tail = masses_of(policy)
        ids_BM = draw(policy, tail, uniform_BM)
    # The tail's mass is the float64 sum of its own probabilities, not 1 minus that of the atoms: it
    # can be 1e-9. Both are in units of the likeliest id, and weights add up to 1.
    top_B1 = logits_BK[:, :1].float().clamp(min=LOWEST)
    logits_BS = torch.cat([tail.top_B1, logits_BK, logits_BV.gather(1, ids_BM)], dim=1)
    below_BS = below_top(logits_BS, top_B1, policy.temperature_B1).double()
    tail_B1 = tail.edge_Bk[:, -1:] * below_BS[:, :1].exp()
    atoms_BK = torch.where(is_atom_BK, below_BS[:, 1 : 1 + ids_BK.shape[1]].exp(), 0.0)
    total_B1 = tail_B1 + atoms_BK.sum(-1, keepdim=True)
    share_B1 = tail_B1 / total_B1
    if wanted.any_thin:
        needed_B1 = (draws_B1 * share_B1).ceil().long()
        draws_B1 = torch.where(thin_B1 == 0, draws_B1, needed_B1.minimum(draws_B1))
    # a tail that float32 calls 0 has no draws
    is_drawn_BM = (_columns(ids_BM) < draws_B1) & (share_B1.float() > 0)
    each_B1 = share_B1 / draws_B1.clamp(min=1)
    weight_BS = torch.cat([atoms_BK / total_B1, each_B1.expand(ids_BM.shape)], dim=1)
    return _masked(
        torch.cat([ids_BK, ids_BM], dim=1),
        weight_BS.clamp_(min=LEAST_WEIGHT),
        (below_BS[:, 1:] - total_B1.log()).float(),
        torch.cat([is_atom_BK, is_drawn_BM], dim=1),
    )


def _columns(ids_BS: torch.Tensor) -> torch.Tensor:
    """Returns int64 [S]: the number of each column."""
    return torch.arange(ids_BS.shape[1], device=ids_BS.device)


def _masked(
    ids_BS: torch.Tensor, weight_BS: torch.Tensor, logp_BS: torch.Tensor, used_BS: torch.Tensor
) -> Selected:
    """Sets UNUSED and 0 where not used. weight_BS: or [B, 1]."""
    return Selected(
        torch.where(used_BS, ids_BS, UNUSED), torch.where(used_BS, weight_BS, 0.0), logp_BS
    )
