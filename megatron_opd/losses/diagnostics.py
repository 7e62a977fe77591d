"""Sums figures over a cache that say how far student, sampler and teacher are apart.

The sums add up over micro-batches and ranks; means and quantiles are taken by the code that has the
global sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objectives import RewardObjective
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.weights import taught, weight_of

if TYPE_CHECKING:
    from megatron_opd.losses.terms import TermLoss

NAMES = (
    "excluded_ids",
    "reverse_kl",
    "reverse_kl_tokens",
    "forward_kl",
    "forward_kl_tokens",
    "k1",
    "k2",
    "k3",
    "prox_k1",
    "prox_k1_weighed",
    "start_k1",
    "start_k3",
    "importance",
    "importance_squared",
    "correction",
    "correction_squared",
    "trust",
    "trust_squared",
    "importance_weight",
    "cut_weight",
    "stopped_weight",
    "advantage_shift",
    "advantage_responses",
)


def diagnose(
    estimator: Estimator, cache: Cache, terms: Sequence[TermLoss]
) -> dict[str, torch.Tensor]:
    """Return float64 scalars by NAMES. reverse_kl, forward_kl: nats, summed over *_tokens."""
    sums = dict.fromkeys(NAMES, cache.student_logp_N.new_zeros(()))
    if estimator.reads_teacher:
        scored = taught(estimator, cache)
        sums["excluded_ids"] = scored.excluded().double()
        sums |= _divergences(estimator, scored)
    sums |= _sampler_gap(cache.of_responses(cache.on_host.imitation_weight_B == 0))
    weighed = next((term for term in terms if len(term.importance_n)), None)
    if weighed is not None:
        weight_n = weighed.measure_n
        for name, factor_n in (
            ("importance", weighed.importance_n),
            ("correction", weighed.kappa_n),
            ("trust", weighed.log_r_n.exp()),
        ):
            sums[name] = (weight_n * factor_n).sum()
            sums[f"{name}_squared"] = (weight_n * factor_n.square()).sum()
        sums["importance_weight"] = weight_n.sum()
        # A mask as an index would ask the device how many there are.
        sums["cut_weight"] = torch.where(weighed.cut_n, weight_n, 0.0).sum()
        sums["stopped_weight"] = torch.where(weighed.stopped_n, weight_n, 0.0).sum()
    return sums | _advantage_shift(estimator, cache, terms)


def _advantage_shift(
    estimator: Estimator, cache: Cache, terms: Sequence[TermLoss]
) -> dict[str, torch.Tensor]:
    """Sum over responses the mean over their tokens of (w - 1) A, of the first term from rewards.

    w is the applied importance weight before the trust region, A the advantage. On policy w is 1
    (GEPO's is not), and the mean of w A over a group is that of A, 0 where A is centred.
    """
    for term, part in zip(estimator.terms, terms, strict=True):
        if isinstance(term.objective, RewardObjective):
            own = cache.of_responses(weight_of(term.objective, cache.on_host) > 0)
            shift_T = (part.importance_n - 1) * part.advantage_n
            if own.num_samples:
                return {
                    "advantage_shift": own.over_responses(shift_T, mean=True).sum(),
                    "advantage_responses": shift_T.new_full((), float(own.num_samples)),
                }
    return {}


def _divergences(estimator: Estimator, cache: Cache) -> dict[str, torch.Tensor]:
    """Estimate KL(p || q) on student-owned supports, KL(q || p) on others, for any objective.

    On top-k sets the sum stops at the set.
    """
    actions, tokens = cache.selected(), actions_tokens(cache)
    gap_n = actions.student_n - actions.teacher_n
    if estimator.support.owner == "teacher":
        return {"forward_kl": -(actions.weight_n * gap_n).sum(), "forward_kl_tokens": tokens}
    ratio_n = (actions.student_n - actions.sampler_n).exp()
    value = (actions.weight_n * ratio_n * gap_n).sum()
    return {"reverse_kl": value, "reverse_kl_tokens": tokens}


def actions_tokens(cache: Cache) -> torch.Tensor:
    """Return T as a float64 scalar on the device of the cache's tensors."""
    return cache.student_logp_N.new_full((), float(cache.num_tokens))


def _sampler_gap(cache: Cache) -> dict[str, torch.Tensor]:
    path = cache.path()
    x_T = path.student_n - path.sampler_n
    sums = {
        "k1": -x_T.sum(),
        "k2": x_T.square().sum() / 2,
        "k3": (torch.expm1(x_T) - x_T).sum(),
    }
    if path.prox_n is not None:
        between_T = path.prox_n - path.student_n
        start_T = path.prox_n - path.sampler_n
        sums["start_k1"] = -start_T.sum()
        sums["start_k3"] = (torch.expm1(start_T) - start_T).sum()
        sums["prox_k1"] = between_T.sum()
        sums["prox_k1_weighed"] = ((path.prox_n - path.sampler_n).exp() * between_T).sum()
    return sums
