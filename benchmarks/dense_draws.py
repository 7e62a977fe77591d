"""Draws and atoms from whole probabilities: what the servers' way is measured against.

softmax, log-softmax and a padded copy of [B, V], as one writes it first.
"""

from __future__ import annotations

import torch

from sglang_bridge.server.selection import LEAST_WEIGHT, UNUSED, Wanted

BLOCK, FLAT_VOCAB = 128, 4096


def recorded(
    logits_BV: torch.Tensor,
    temperature_B1: torch.Tensor,
    path_B1: torch.Tensor,
    wanted: Wanted,
    uniform_BM: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (ids, weights, log-probs) [B, R] of atoms, draws from the tail, and the path."""
    tempered_BV = logits_BV.float() / temperature_B1
    logp_BV = torch.log_softmax(tempered_BV, dim=-1)
    probs_BV = torch.softmax(tempered_BV, dim=-1)
    atoms_B1, draws_B1, _ = wanted.to(logits_BV.device)
    selected = [(path_B1, torch.zeros_like(path_B1, dtype=torch.float64))]
    tail_BV, mass_B1 = probs_BV, torch.zeros_like(path_B1, dtype=torch.float64)
    mass_BK, ids_BK, is_atom_BK = mass_B1, path_B1, path_B1 < 0
    if wanted.max_atoms:
        logp_BK, ids_BK = logp_BV.topk(wanted.max_atoms, dim=-1)
        column_K = torch.arange(ids_BK.shape[1], device=ids_BK.device)
        is_atom_BK = (column_K < atoms_B1) & (logp_BK > -torch.inf)
        probs_BK = probs_BV.gather(1, ids_BK)
        tail_BV = probs_BV.scatter(1, ids_BK, probs_BK.masked_fill(is_atom_BK, 0.0))
        mass_BK = probs_BK.double()
        mass_B1 = mass_BK.masked_fill(~is_atom_BK, 0.0).sum(-1, keepdim=True)
    ids_BM, tail_B1 = draw(tail_BV, uniform_BM)
    total_B1 = tail_B1 + mass_B1
    column_M = torch.arange(ids_BM.shape[1], device=ids_BM.device)
    is_drawn_BM = (column_M < draws_B1) & (tail_BV.gather(1, ids_BM) > 0)
    each_B1 = tail_B1 / total_B1 / draws_B1.clamp(min=1)
    selected.append(_masked(ids_BM, each_B1.expand(ids_BM.shape), is_drawn_BM))
    if wanted.max_atoms:
        selected.append(_masked(ids_BK, mass_BK / total_B1, is_atom_BK))
    ids_BR, order_BR = torch.cat([ids for ids, _ in selected], dim=1).sort(dim=1)
    weight_BR = torch.cat([weight for _, weight in selected], dim=1).gather(1, order_BR)
    new_BR = torch.ones_like(ids_BR, dtype=torch.bool)
    new_BR[:, 1:] = ids_BR[:, 1:] != ids_BR[:, :-1]
    slot_BR = new_BR.cumsum(1) - 1
    distinct_BR = torch.full_like(ids_BR, UNUSED).scatter_(1, slot_BR, ids_BR)
    sums_BR = torch.zeros_like(weight_BR).scatter_add_(1, slot_BR, weight_BR)
    logp_BR = logp_BV.gather(1, distinct_BR.clamp(max=logits_BV.shape[1] - 1))
    return distinct_BR, sums_BR.float(), logp_BR


def _masked(
    ids_BS: torch.Tensor, weight_BS: torch.Tensor, used_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    weight_BS = weight_BS.clamp(min=LEAST_WEIGHT).masked_fill(~used_BS, 0.0)
    return ids_BS.masked_fill(~used_BS, UNUSED), weight_BS


def draw(probs_BV: torch.Tensor, uniform_BM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids [B, M], float64 [B, 1] sum of each row), by inverse CDF in two levels."""
    rows, vocab = probs_BV.shape
    if vocab <= FLAT_VOCAB:
        total_B1 = probs_BV.sum(-1, keepdim=True, dtype=torch.float64)
        return _invert(probs_BV, uniform_BM * total_B1)[0], total_B1
    blocks = -(-vocab // BLOCK)
    padded_BV = torch.nn.functional.pad(probs_BV, (0, blocks * BLOCK - vocab))
    probs_BkV = padded_BV.view(rows, blocks, BLOCK)
    mass_Bk = probs_BkV.sum(-1, dtype=torch.float64)
    total_B1 = mass_Bk.sum(-1, keepdim=True)
    target_BM = uniform_BM * total_B1
    block_BM, before_BM = _invert(mass_Bk, target_BM)
    chosen_BMv = probs_BkV.gather(1, block_BM[..., None].expand(-1, -1, BLOCK))
    inside_BM1, _ = _invert(chosen_BMv, (target_BM - before_BM)[..., None])
    return block_BM * BLOCK + inside_BM1.squeeze(-1), total_B1


def _invert(mass: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    edge = mass.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(edge, target, right=True).clamp_(max=mass.shape[-1] - 1)
    heaviest = mass.argmax(-1, keepdim=True)
    index = torch.where(mass.gather(-1, found) > 0, found, heaviest)
    return index, edge.gather(-1, index) - mass.gather(-1, index)
