"""Computes the distribution SGLang really samples from, and makes iid draws from it.

Pure torch, any device, no device sync. Axes: B rows of a step (one a request, or one a scored
position), V vocabulary, M draws (the step's largest request), R columns of ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128  # items of a block of the two-level draw
FLAT_VOCAB = 4096  # up to this vocabulary one level is cheaper


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Holds the behaviour distribution of one step.

    probs_BV: float32, proportional to it, exactly 0 outside its support. logp_BV: float32, log
    softmax of the tempered logits; minus norm_B (log of the mass that truncation kept) it is the
    log-prob of any id in the support. dropped_BV: bool, what truncation cut away. The last two are
    None in a step without truncation.
    """

    probs_BV: torch.Tensor
    logp_BV: torch.Tensor
    dropped_BV: torch.Tensor | None = None
    norm_B: torch.Tensor | None = None

    def gather(self, ids_BR: torch.Tensor) -> torch.Tensor:
        """Returns float32 [B, R]: log-prob of ids of the support."""
        logp_BR = self.logp_BV.gather(1, ids_BR)
        return logp_BR if self.norm_B is None else logp_BR - self.norm_B[:, None]

    def likeliest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (ids int64, log-probs) [B, count], likeliest first; -inf outside the support.

        By log-prob: a float32 probability of 0 can still be a likely id's among 152k. Which of
        equal ids come first is torch.topk's choice, the same for the same logits.
        """
        logp_BV = self.logp_BV
        if self.dropped_BV is not None:
            logp_BV = logp_BV.masked_fill(self.dropped_BV, -torch.inf)
        logp_BK, ids_BK = logp_BV.topk(count, dim=-1)
        return ids_BK, logp_BK if self.norm_B is None else logp_BK - self.norm_B[:, None]


def behaviour(
    logits_BV: torch.Tensor,
    temperature_B1: torch.Tensor,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
) -> Behaviour:
    """Returns SGLang's sampling distribution for these logits, which are not modified.

    Its order: temper, softmax, then top-k and top-p together on the sorted untruncated mass, then
    min-p, then renormalise (sampler.py, top_k_top_p_min_p_sampling_from_probs_torch). A filter that
    is None is off for the step.
    """
    tempered_BV = logits_BV.float() / temperature_B1
    logp_BV = torch.log_softmax(tempered_BV, dim=-1)
    # softmax, not exp(log_softmax): ties at a cut must fall as they fall in the sampler.
    probs_BV = torch.softmax(tempered_BV, dim=-1)
    if top_k_B is None and top_p_B is None and min_p_B is None:
        return Behaviour(probs_BV, logp_BV)
    dropped_BV = dropped(probs_BV, top_k_B, top_p_B, min_p_B)
    kept_BV = probs_BV.masked_fill(dropped_BV, 0.0)
    norm_B = logp_BV.masked_fill(dropped_BV, -torch.inf).logsumexp(-1)
    return Behaviour(kept_BV, logp_BV, dropped_BV, norm_B)


def dropped(
    probs_BV: torch.Tensor,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns bool [B, V]: what SGLang's filters cut away; one that is None is off for the step."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    dropped_BV = torch.zeros_like(sorted_BV, dtype=torch.bool)
    if top_k_B is not None:
        rank_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
        dropped_BV |= rank_V[None, :] >= top_k_B[:, None]
    if top_p_B is not None:
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        dropped_BV |= before_BV > top_p_B[:, None]
    if min_p_B is not None:
        dropped_BV |= sorted_BV < (sorted_BV[:, :1] * min_p_B[:, None])
    return torch.zeros_like(dropped_BV).scatter_(1, order_BV, dropped_BV)


def draw(probs_BV: torch.Tensor, uniform_BM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (int64 [B, M] iid ids by inverse CDF, float64 [B, 1] sum of each row).

    uniform_BM: float64 in [0, 1). Masses are accumulated in float64: a float32 CDF of 152k ids
    cannot reach those whose probability falls below its rounding near 1. An id of probability 0 is
    never returned while its row has any mass.
    """
    rows, vocab = probs_BV.shape
    if vocab <= FLAT_VOCAB:
        total_B1 = probs_BV.sum(-1, keepdim=True, dtype=torch.float64)
        return _invert(probs_BV, uniform_BM * total_B1)[0], total_B1
    # Two levels: a draw looks at the block masses and at one block, not at a float64 copy of all.
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
    """Returns (index of the item whose share of the cumulative mass holds the target, mass before).

    mass: [..., n]; target: [..., m], in [0, sum of mass). Rounding can leave a target past the last
    edge, and a parallel scan can order two equal edges badly: the heaviest item answers where the
    item found has no mass, an error of the size of that rounding.
    """
    edge = mass.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(edge, target, right=True).clamp_(max=mass.shape[-1] - 1)
    heaviest = mass.argmax(-1, keepdim=True)
    index = torch.where(mass.gather(-1, found) > 0, found, heaviest)
    return index, edge.gather(-1, index) - mass.gather(-1, index)
