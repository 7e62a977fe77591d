"""Says what distribution SGLang really samples from.

Pure torch, any device, no device sync. Axes: B rows of a step (one a request, or one a scored
position), V vocabulary, K likeliest ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Holds the behaviour distribution of one step: softmax(logits_BV / temperature_B1).

    logits_BV: contiguous. In a step without truncation they are SGLang's own, which its sampler
    overwrites. Where is_cut they are ours: log-probs of what truncation kept, -inf elsewhere, at
    temperature 1. temperature_B1: float32, [B, 1] or [1, 1].
    """

    logits_BV: torch.Tensor
    temperature_B1: torch.Tensor
    is_cut: bool = False

    def likeliest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (ids int64, logits) [B, count], likeliest first; -inf outside the support.

        By logit: a float32 probability of 0 can still be a likely id's among 152k. Which of equal
        ids come first is torch.topk's choice, the same for the same logits.
        """
        logits_BK, ids_BK = self.logits_BV.topk(count, dim=-1)
        return ids_BK, logits_BK

    def rows(self, low: int, high: int) -> Behaviour:
        """Returns rows [low, high), which share memory with these."""
        temperature_B1 = self.temperature_B1
        if len(temperature_B1) > 1:
            temperature_B1 = temperature_B1[low:high]
        return Behaviour(self.logits_BV[low:high], temperature_B1, self.is_cut)

    @contextmanager
    def without(
        self, ids_BK: torch.Tensor, logits_BK: torch.Tensor, gone_BK: torch.Tensor
    ) -> Iterator[None]:
        """Gives the ids that are gone probability 0, for as long as this lasts.

        ids_BK: distinct in a row, with their logits. In place, since a copy would be another pass
        over everything; what runs on the device in between sees it, and no one after.
        """
        self.logits_BV.scatter_(1, ids_BK, logits_BK.masked_fill(gone_BK, -torch.inf))
        try:
            yield
        finally:
            self.logits_BV.scatter_(1, ids_BK, logits_BK)


def behaviour(
    logits_BV: torch.Tensor,
    temperature_B1: torch.Tensor,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
) -> Behaviour:
    """Returns SGLang's sampling distribution for these logits, which keep their values.

    Its order: temper, softmax, then top-k and top-p together on the sorted untruncated mass, then
    min-p, then renormalise (sampler.py, top_k_top_p_min_p_sampling_from_probs_torch). A filter that
    is None is off for the step.
    """
    if top_k_B is None and top_p_B is None and min_p_B is None:
        return Behaviour(logits_BV.contiguous(), temperature_B1)
    tempered_BV = logits_BV.float() / temperature_B1
    # softmax, not exp(log_softmax): ties at a cut must fall as they fall in the sampler.
    dropped_BV = dropped(torch.softmax(tempered_BV, dim=-1), top_k_B, top_p_B, min_p_B)
    logp_BV = torch.log_softmax(tempered_BV.masked_fill_(dropped_BV, -torch.inf), dim=-1)
    return Behaviour(logp_BV, torch.ones_like(temperature_B1), is_cut=True)


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
