"""Evaluates the loss of an estimator on a cache, with its diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.trust import M2Trust
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.diagnostics import diagnose
from megatron_opd.losses.reduction import reduced
from megatron_opd.losses.terms import TermLoss, term_loss
from megatron_opd.losses.trust import second_moment_limit

View = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(log r, A, weight) of some actions, from which M2PO's limit is found."""


@dataclass(frozen=True)
class Evaluation:
    """Holds an evaluated loss: loss_sum, a float64 scalar, and count, its global sum's divisor.

    loss_sum is differentiable. sums: float64 scalars that add up over micro-batches and ranks, by
    name (diagnostics.py). terms: one per term of the objective.
    """

    loss_sum: torch.Tensor
    count: int
    sums: dict[str, torch.Tensor]
    terms: tuple[TermLoss, ...]


def evaluate(estimator: Estimator, cache: Cache) -> Evaluation:
    """Evaluate the configured loss in float64; gradients reach cache.student_logp_N."""
    cache = cache.wide()
    limits = cache.m2_limits or tuple(m2_limit_of(estimator, cache, None))
    terms = tuple(
        term_loss(term.objective, estimator, cache, limit)
        for term, limit in zip(estimator.terms, limits, strict=True)
    )
    loss_T = torch.stack(
        [term.coefficient * part.loss_T for term, part in zip(estimator.terms, terms, strict=True)]
    ).sum(0)
    loss_sum, count = reduced(estimator.reduction, loss_T, cache)
    with torch.no_grad():
        sums = diagnose(estimator, cache, terms)
    return Evaluation(loss_sum, count, sums, terms)


def m2_limit_of(
    estimator: Estimator,
    cache: Cache,
    gathered: Sequence[View] | None,
) -> list[torch.Tensor | None]:
    """Return M2PO's limit of every term that has one.

    gathered: per term the (log r, A, weight) of the whole mini-batch, as m2_view gives them; None
    takes this cache for all of it.
    """
    views = m2_view(estimator, cache) if gathered is None else gathered
    limits: list[torch.Tensor | None] = []
    for term, view in zip(estimator.terms, views, strict=True):
        trust = term.objective.trust_region
        limits.append(second_moment_limit(*view, trust) if isinstance(trust, M2Trust) else None)
    return limits


@torch.no_grad()
def m2_view(estimator: Estimator, cache: Cache) -> list[View]:
    """Return (log r, A, weight) of every action by term, float64; empty without M2PO."""
    cache = cache.wide()
    views: list[View] = []
    for term in estimator.terms:
        if isinstance(term.objective.trust_region, M2Trust):
            nothing_masked = cache.student_logp_N.new_tensor(torch.inf)
            part = term_loss(term.objective, estimator, cache, nothing_masked)
            views.append((part.log_r_n, part.advantage_n, part.measure_n))
        else:
            none = cache.student_logp_N.new_zeros(0)
            views.append((none, none, none))
    return views
