"""Weighs ratios of learner to sampler: the learner-sampler correction (TIS; AsyncOPD Eq. 5).

One table; every entry maps a log-ratio to the factor that multiplies the loss. Axis n: actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_opd.config.corrections import (
    CorrectionConfig,
    ImportanceCorrection,
    MaskedCorrection,
    NoCorrection,
    TruncatedCorrection,
)
from megatron_opd.losses.cache import Actions, Cache
from megatron_opd.losses.divergences import floored

LARGEST_LOG_FACTOR = math.log(torch.finfo(torch.float32).max) / 2  # float32 holds its square


@dataclass(frozen=True)
class Corrected:
    """Says how actions are weighed; the loss's ratio is factor * exp(log_trust).

    factor_n: detached. log_trust_n: differentiable, what a trust region acts on. cut_n: where the
    correction changed the ratio.
    """

    factor_n: torch.Tensor
    log_trust_n: torch.Tensor
    cut_n: torch.Tensor


def no_factor(config: NoCorrection, log_ratio_n: torch.Tensor) -> torch.Tensor:
    """Return 1: the sampler is taken for the learner. Biased towards the sampler."""
    return torch.ones_like(log_ratio_n)


def importance_factor(config: ImportanceCorrection, log_ratio_n: torch.Tensor) -> torch.Tensor:
    """Return rho. Unbiased while the sampler covers the learner; its variance has no bound.

    A response's ratio can exceed every float: exp(LARGEST_LOG_FACTOR) is its limit.
    """
    return log_ratio_n.clamp(max=LARGEST_LOG_FACTOR).exp()


def truncated_factor(config: TruncatedCorrection, log_ratio_n: torch.Tensor) -> torch.Tensor:
    """Return min(rho, C) (TIS). Biased towards the sampler where rho > C; variance <= C-fold."""
    return log_ratio_n.clamp(max=math.log(config.max_ratio)).exp()


def masked_factor(config: MaskedCorrection, log_ratio_n: torch.Tensor) -> torch.Tensor:
    """Return rho inside [min_ratio, max_ratio], else 0. Biased by the actions it leaves out."""
    low = -math.inf if config.min_ratio == 0 else math.log(config.min_ratio)
    inside_n = (log_ratio_n >= low) & (log_ratio_n <= math.log(config.max_ratio))
    return torch.where(inside_n, log_ratio_n, -math.inf).exp()


FACTORS: dict[type[CorrectionConfig], Callable[[Any, torch.Tensor], torch.Tensor]] = {
    NoCorrection: no_factor,
    ImportanceCorrection: importance_factor,
    TruncatedCorrection: truncated_factor,
    MaskedCorrection: masked_factor,
}


def correct(config: CorrectionConfig, actions: Actions, cache: Cache) -> Corrected:
    """Return factor and trust ratio of every action.

    With prox: factor T(prox / sampler), trust ratio student / prox (decoupled PPO; PPO-TIS).
    Without: the one ratio is student / sampler. `importance` keeps it whole and differentiable (a
    clip then acts on it: PPO-IS); every other correction makes it a detached factor of grad log p.
    """
    if config.prox:
        log_trust_n = floored(actions.student_n) - floored(_prox(actions))
    else:
        if config.keeps_whole_ratio:
            log_ratio_n = floored(actions.student_n) - actions.sampler_n
            ones_n = torch.ones_like(log_ratio_n)
            return Corrected(ones_n, log_ratio_n, torch.zeros_like(ones_n, dtype=torch.bool))
        log_trust_n = actions.student_n - actions.student_n.detach()
    log_ratio_n = log_ratio(config, actions, cache).detach()
    factor_n = FACTORS[type(config)](config, log_ratio_n)
    cut_n = (factor_n != log_ratio_n.exp()) & config.corrects
    return Corrected(factor_n, log_trust_n, cut_n)


def log_ratio(config: CorrectionConfig, actions: Actions, cache: Cache) -> torch.Tensor:
    """Return the log-ratio of learner to sampler, of the action or of its response.

    A response's log-ratio is the sum, or mean (geometric), over all its sampled tokens, whichever
    actions are weighed.
    """
    level = config.ratio_level
    if level == "token":
        return _learner(config, actions) - actions.sampler_n
    path = cache.path()
    log_ratio_T = _learner(config, path) - path.sampler_n
    of_response_B = cache.over_responses(log_ratio_T, mean=level == "geometric")
    return of_response_B[cache.sample_T][actions.row_n]


def _learner(config: CorrectionConfig, actions: Actions) -> torch.Tensor:
    return floored(_prox(actions) if config.prox else actions.student_n)


def _prox(actions: Actions) -> torch.Tensor:
    assert actions.prox_n is not None, "the learner must recompute log-probs for prox"
    return actions.prox_n
