"""Evaluates the loss of an estimator on a cache, with its diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objective import Objective
from megatron_opd.config.trust import M2Trust
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.diagnostics import diagnose
from megatron_opd.losses.host import sent
from megatron_opd.losses.reduction import count_of, reduced
from megatron_opd.losses.terms import TermLoss, term_loss, unweighed
from megatron_opd.losses.trust import second_moment_limit
from megatron_opd.losses.weights import counted, weight_of

View = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(log r, A, weight) of some actions, from which M2PO's limit is found."""


@dataclass(frozen=True)
class Evaluation:
    """Holds an evaluated loss: loss_sum, a float64 scalar, and count, its global sum's divisor.

    loss_sum is differentiable. sums: float64 scalars that add up over micro-batches and ranks, by
    name (diagnostics.py). terms: one per term of the objective.
    """

    loss_sum: torch.Tensor
    count: float
    sums: dict[str, torch.Tensor]
    terms: tuple[TermLoss, ...]


def evaluate(estimator: Estimator, cache: Cache) -> Evaluation:
    """Evaluate the configured loss in float64; gradients reach cache.student_logp_N."""
    cache = cache.wide()
    limits = cache.m2_limits or tuple(m2_limit_of(estimator, cache, None))
    terms = tuple(
        _term(term.objective, estimator, cache, limit)
        for term, limit in zip(estimator.terms, limits, strict=True)
    )
    loss_T = torch.stack(
        [term.coefficient * part.loss_T for term, part in zip(estimator.terms, terms, strict=True)]
    ).sum(0)
    loss_sum = reduced(estimator.reduction, loss_T, cache)
    count = count_of(estimator.reduction, *counted(estimator, cache))
    with torch.no_grad():
        sums = diagnose(estimator, cache, terms)
    return Evaluation(loss_sum, count, sums, terms)


def _term(
    objective: Objective, estimator: Estimator, cache: Cache, limit: torch.Tensor | None
) -> TermLoss:
    """Compute one term on the responses that it reads; its loss_T is weighed and of all tokens."""
    host = cache.on_host
    kept_B = weight_of(objective, host) > 0
    own = cache.of_responses(kept_B)
    if own.num_samples == 0:  # its gradient is 0, and not absent
        nothing_T = cache.per_token(cache.student_logp_N[:0], cache.row_N[:0])
        return unweighed(nothing_T)
    part = term_loss(objective, estimator, own, limit)
    loss_T = part.loss_T * weight_of(objective, own).index_select(0, own.sample_T)
    if own is cache:
        return replace(part, loss_T=loss_T)
    place_T = sent(np.flatnonzero(kept_B[host.sample_T]), loss_T.device)
    return replace(part, loss_T=cache.per_token(loss_T, place_T))


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
            nothing_masked = cache.student_logp_N.new_full((), torch.inf)
            part = _term(term.objective, estimator, cache, nothing_masked)
            views.append((part.log_r_n, part.advantage_n, part.measure_n))
        else:
            none = cache.student_logp_N.new_zeros(0)
            views.append((none, none, none))
    return views
