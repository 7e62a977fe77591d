"""The distribution SGLang really samples from, and iid draws from it.

Pure torch, any device, no device sync. Axes: B requests of a step, V vocabulary, M draws (the
step's largest request), R = M + 1 cache columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256  # about sqrt(V): a draw looks at V / BLOCK block masses and one block


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The behaviour distribution of one step.

    probs_BV: float32, proportional to it, exactly 0 outside its support. logp_BV: float32, log
    softmax of the tempered logits; minus norm_B (log of the mass that truncation kept) it is the
    log-prob of any id in the support.
    """

    probs_BV: torch.Tensor
    logp_BV: torch.Tensor
    norm_B: torch.Tensor | None

    def gather(self, ids_BR: torch.Tensor) -> torch.Tensor:
        """float32 [B, R]: log-prob of ids of the support."""
        logp_BR = self.logp_BV.gather(1, ids_BR)
        return logp_BR if self.norm_B is None else logp_BR - self.norm_B[:, None]


def behaviour(
    logits_BV: torch.Tensor,
    temperature_B1: torch.Tensor,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
) -> Behaviour:
    """SGLang's sampling distribution for these logits; the logits are not modified.

    Its order: temper, softmax, then top-k and top-p together on the sorted untruncated mass, then
    min-p, then renormalise (sampler.py, top_k_top_p_min_p_sampling_from_probs_torch). A filter that
    is None is off for the step.
    """
    tempered_BV = logits_BV.float() / temperature_B1
    logp_BV = torch.log_softmax(tempered_BV, dim=-1)
    # softmax, not exp(log_softmax): ties at a cut must fall as they fall in the sampler.
    probs_BV = torch.softmax(tempered_BV, dim=-1)
    if top_k_B is None and top_p_B is None and min_p_B is None:
        return Behaviour(probs_BV, logp_BV, None)
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
    dropped_BV = torch.zeros_like(dropped_BV).scatter_(1, order_BV, dropped_BV)
    kept_BV = probs_BV.masked_fill(dropped_BV, 0.0)
    norm_B = logp_BV.masked_fill(dropped_BV, -torch.inf).logsumexp(-1)
    return Behaviour(kept_BV, logp_BV, norm_B)


def draw(probs_BV: torch.Tensor, uniform_BM: torch.Tensor) -> torch.Tensor:
    """int64 [B, M] iid ids by inverse CDF.

    uniform_BM: float64 in [0, 1); it picks a block by its mass, then an id in the block.

    Masses are accumulated in float64: a float32 CDF of 152k ids cannot reach those whose
    probability falls below its rounding near 1. An id of probability 0 is never returned while its
    row has any mass.
    """
    rows, vocab = probs_BV.shape
    blocks = -(-vocab // BLOCK)
    padded_BV = torch.nn.functional.pad(probs_BV, (0, blocks * BLOCK - vocab))
    probs_BkV = padded_BV.view(rows, blocks, BLOCK)
    mass_Bk = probs_BkV.sum(-1, dtype=torch.float64)
    edge_Bk = mass_Bk.cumsum(-1)
    target_BM = uniform_BM * edge_Bk[:, -1:]
    block_BM = _first_beyond(edge_Bk[:, None], mass_Bk[:, None], target_BM)
    rest_BM = target_BM - (edge_Bk.gather(1, block_BM) - mass_Bk.gather(1, block_BM))
    chosen_BMv = probs_BkV.gather(1, block_BM[..., None].expand(-1, -1, BLOCK))
    edge_BMv = chosen_BMv.cumsum(-1, dtype=torch.float64)
    inside_BM = _first_beyond(edge_BMv, chosen_BMv, rest_BM)
    return block_BM * BLOCK + inside_BM


def _first_beyond(edge: torch.Tensor, mass: torch.Tensor, target_BM: torch.Tensor) -> torch.Tensor:
    """Index of the first item with mass whose cumulative edge passes the target; [B, M].

    Rounding can leave a target at or past the last edge (or let a parallel scan order two equal
    edges badly): the heaviest item answers then, an error of the size of that rounding.
    """
    passed = (edge > target_BM[..., None]) & (mass > 0)
    first_BM = passed.to(torch.uint8).argmax(-1)
    heaviest_BM = mass.argmax(-1).expand_as(first_BM)
    return torch.where(passed.any(-1), first_BM, heaviest_BM)
