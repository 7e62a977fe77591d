"""Computes divergences of next-token distributions p (student), q (teacher) as sums over actions.

Each is D = sum_a value(a) and its gradient sum_a p(a) * (-pull(a)) * grad log p(a), where pull may
be shifted by any constant: sum_a p grad log p = 0. The shift `balance` makes pull 0 where p = q,
so that a sampled gradient is exactly 0 at the goal; it is AsyncOPD Eq. 3's dropped +1.

log p and log q are floored at LOG_FLOOR, so that their ratio stays within float64 and no 0 * inf
arises; the gradient passes the floor: where the student forbids what the teacher does is where it
is needed most. All functions take and return float64 [n].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_opd.config.objectives import (
    DivergenceObjective,
    ForwardKl,
    Jsd,
    Outside,
    SkewForwardKl,
    SkewReverseKl,
    SparseReverseKl,
)
from megatron_opd.losses.cache import Actions

LOG_FLOOR = -300.0  # exp of it times exp of its opposite stays within float64
REST_FLOOR = math.log(2**-24)  # float32 log-probs cannot tell less mass outside a set from none


@dataclass(frozen=True)
class Divergence:
    """Holds value(p_log, q_log), pull(p_log, q_log) and the constant that makes pull 0 at p = q."""

    value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    pull: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    balance: float


def reverse_kl(config: Any) -> Divergence:
    """Return sum p (log p - log q) (AsyncOPD Eq. 2); pull = log q - log p, Eq. 3's advantage."""
    return Divergence(lambda p, q: p.exp() * (p - q), lambda p, q: q - p, 0.0)


def forward_kl(config: Any) -> Divergence:
    """Return sum q (log q - log p) (AsyncOPD Eq. 1); pull = q / p."""
    return Divergence(lambda p, q: q.exp() * (q - p), lambda p, q: (q - p).exp(), 1.0)


def jensen_shannon(config: Jsd) -> Divergence:
    """Return beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (GKD).

    pull = (1 - beta) log(m / p).
    """
    beta = config.beta

    def value(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        m = _mix(q, p, beta)
        return beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)

    return Divergence(value, lambda p, q: (1 - beta) * (_mix(q, p, beta) - p), 0.0)


def skew_forward_kl(config: SkewForwardKl) -> Divergence:
    """Return KL(q || m), m = alpha q + (1 - alpha) p (DistiLLM); pull = (1 - alpha) q / m."""
    alpha = config.alpha
    return Divergence(
        lambda p, q: q.exp() * (q - _mix(q, p, alpha)),
        lambda p, q: (1 - alpha) * (q - _mix(q, p, alpha)).exp(),
        1 - alpha,
    )


def skew_reverse_kl(config: SkewReverseKl) -> Divergence:
    """Return KL(p || m), m = alpha p + (1 - alpha) q (DistiLLM).

    pull = log(m / p) + alpha p / m.
    """
    alpha = config.alpha

    def pull(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        m = _mix(p, q, alpha)
        return m - p + alpha * (p - m).exp()

    return Divergence(lambda p, q: p.exp() * (p - _mix(p, q, alpha)), pull, alpha)


DIVERGENCES: dict[type[DivergenceObjective], Callable[[Any], Divergence]] = {
    SparseReverseKl: reverse_kl,
    ForwardKl: forward_kl,
    Jsd: jensen_shannon,
    SkewForwardKl: skew_forward_kl,
    SkewReverseKl: skew_reverse_kl,
}


def on_set(
    divergence: Divergence,
    student_n: torch.Tensor,
    teacher_n: torch.Tensor,
    row_n: torch.Tensor,
    num_tokens: int,
    outside: Outside,
) -> torch.Tensor:
    """Return [T]: the divergence on each row's set of ids, differentiable through the student.

    outside: renormalise both distributions on the set (AsyncOPD Eq. 9-10); bucket adds one action
    that holds all that is outside (never negative, exact when nothing is outside); drop ignores it
    (may be negative). The first and last are biased by what is outside.
    """
    if outside == "renormalise":
        student_n = student_n - log_mass(student_n, row_n, num_tokens)[row_n]
        teacher_n = teacher_n - log_mass(teacher_n, row_n, num_tokens)[row_n]
    value_n = divergence.value(floored(student_n), floored(teacher_n))
    value_T = value_n.new_zeros(num_tokens).index_add(0, row_n, value_n)
    if outside != "bucket":
        return value_T
    rest_p_T = log_rest(log_mass(student_n, row_n, num_tokens))
    rest_q_T = log_rest(log_mass(teacher_n, row_n, num_tokens))
    return value_T + divergence.value(floored(rest_p_T), floored(rest_q_T))


def renormalised(actions: Actions, num_tokens: int) -> Actions:
    """Divide every distribution by its sum over the row's set of ids (Eq. 9).

    The weights too: on a set they are the sampler's probabilities.
    """
    row_n = actions.row_n

    def over_set(logp_n: torch.Tensor) -> torch.Tensor:
        return logp_n - log_mass(logp_n, row_n, num_tokens)[row_n]

    weight_T = actions.weight_n.new_zeros(num_tokens).index_add(0, row_n, actions.weight_n)
    return replace(
        actions,
        student_n=over_set(actions.student_n),
        sampler_n=over_set(actions.sampler_n),
        teacher_n=over_set(actions.teacher_n),
        prox_n=None if actions.prox_n is None else over_set(actions.prox_n),
        weight_n=actions.weight_n / weight_T[row_n],
    )


def log_mass(logp_n: torch.Tensor, row_n: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return [T]: log of the summed probability of each row; LOG_FLOOR for a row without ids."""
    top_T = logp_n.new_full((num_tokens,), LOG_FLOOR)
    top_T = top_T.scatter_reduce(0, row_n, logp_n.detach(), "amax", include_self=False)
    mass_T = logp_n.new_zeros(num_tokens).index_add(0, row_n, (logp_n - top_T[row_n]).exp())
    return (
        torch.where(mass_T > 0, mass_T.clamp(min=torch.finfo(mass_T.dtype).tiny).log(), 0) + top_T
    )


def log_rest(log_mass_T: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)); REST_FLOOR, without a gradient, where rounding leaves no more."""
    left_T = -torch.expm1(log_mass_T)
    some_T = left_T > math.exp(REST_FLOOR)
    return torch.where(some_T, torch.where(some_T, left_T, 1.0).log(), REST_FLOOR)


def floored(logp_n: torch.Tensor) -> torch.Tensor:
    """Raise values to LOG_FLOOR at least, with the gradient of logp itself."""
    return logp_n + (logp_n.clamp(min=LOG_FLOOR) - logp_n).detach()


def _mix(first_n: torch.Tensor, second_n: torch.Tensor, share: float) -> torch.Tensor:
    """Return log(share * exp(first) + (1 - share) * exp(second))."""
    return torch.logaddexp(first_n + math.log(share), second_n + math.log1p(-share))
