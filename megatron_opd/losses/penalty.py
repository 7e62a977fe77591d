"""Estimates KL penalties on the sampled tokens, unbiased in value and gradient unless named so.

The tokens a come from the sampler o at the prefixes that it visited, never from the student p. With
reference f, x = log p(a) - log f(a), rho = p(a) / o(a), g = grad log p(a), and E over a ~ o:

    divergence            estimator  value                  gradient        unbiased where o covers
    KL(p || f), reverse   k1         rho x                  rho (x + 1) g   p
    KL(p || f), reverse   k2, k3     rho (exp(-x) - 1 + x)  rho x g         p; the value also f
    KL(o || p), forward   k1         -x                     -g              (anything)
    KL(o || p), forward   k3         exp(x) - 1 - x         (exp(x) - 1) g  p

Each gradient is that of its value. Proof: E[rho F] = E_p[F], sum_a p g = 0 (k1's + 1) and
sum_a o rho (exp(-x) - 1) = sum_a f - p = 0. k2's own value, rho x^2 / 2, is a biased estimate of
the KL; its gradient with rho held is rho x g, k3's: so k2 is k3 here.

Without rho, on tokens of o: the gradient of k1 is -grad KL(o || p), so that descent with f = o
drives p away; that of k3 is (1 - exp(-x)) g, -147 g where log p = -6 and log o = -1 (forward k3:
-0.99 g). x^2 / 2 has no place in the forward direction: E[x g] is no divergence's gradient.

k3_unweighted is that k3, for comparisons: TRL's and verl's penalty (verl cuts values at 10), and
CPPO-KL in the code of GEPO's authors. It has the value and the gradient of chi^2(o || p) -
KL(o || p) where f = o, and on policy with f = q the gradient E_p[(1 - q / p) g] = grad KL(q || p).

A token to which the reference gives no probability is left out: KL(p || f) is infinite there.
Axis n: sampled tokens; all float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_opd.config.penalty import UNWEIGHTED, KlDirection, KlPenalty
from megatron_opd.losses.cache import Actions
from megatron_opd.losses.corrections import LARGEST_LOG_FACTOR
from megatron_opd.losses.divergences import floored

Estimate = tuple[torch.Tensor, torch.Tensor]
"""(value_n, slope_n): the estimate, and the detached factor of grad log p of the token."""


def reverse_k1(x_n: torch.Tensor, log_rho_n: torch.Tensor) -> Estimate:
    """Return rho x; noisy even at p = f, where its gradient is rho g."""
    rho_n = _factor(log_rho_n)
    return rho_n * x_n, rho_n * (x_n + 1)


def reverse_k3(x_n: torch.Tensor, log_rho_n: torch.Tensor) -> Estimate:
    """Return rho (exp(-x) - 1 + x) >= 0; value and gradient are 0 at p = f."""
    rho_n = _factor(log_rho_n)
    near_n = rho_n * (torch.expm1(-x_n.clamp(-1, 1)) + x_n)
    far_n = _factor(log_rho_n - x_n) + rho_n * (x_n - 1)  # rho exp(-x) = f / o
    return torch.where(x_n.abs() < 1, near_n, far_n), rho_n * x_n


def forward_k1(x_n: torch.Tensor, log_rho_n: torch.Tensor) -> Estimate:
    """Return -x, whose gradient pulls every sampled token up alike."""
    return -x_n, -torch.ones_like(x_n)


def forward_k3(x_n: torch.Tensor, log_rho_n: torch.Tensor) -> Estimate:
    """Return exp(x) - 1 - x >= 0; a token's pull is never stronger than g upwards.

    Where the student gives a token over exp(LARGEST_LOG_FACTOR) times o's probability the value
    continues along its tangent.
    """
    bounded_n = x_n.clamp(max=LARGEST_LOG_FACTOR)
    slope_n = torch.expm1(bounded_n)
    return slope_n + bounded_n.exp() * (x_n - bounded_n) - x_n, slope_n


def unweighted_k3(x_n: torch.Tensor, log_rho_n: torch.Tensor) -> Estimate:
    """Return exp(-x) - 1 + x >= 0; nothing bounds a token's pull but the cut of forward_k3."""
    value_n, slope_n = forward_k3(-x_n, log_rho_n)
    return value_n, -slope_n


ESTIMATES: dict[tuple[KlDirection, str], Callable[[torch.Tensor, torch.Tensor], Estimate]] = {
    ("reverse", "k1"): reverse_k1,
    ("reverse", "k2"): reverse_k3,
    ("reverse", "k3"): reverse_k3,
    ("reverse", UNWEIGHTED): unweighted_k3,
    ("forward", "k1"): forward_k1,
    ("forward", "k3"): forward_k3,
}


def kl_penalty(config: KlPenalty, actions: Actions) -> torch.Tensor:
    """Return [n]: coefficient * the estimated divergence, differentiable; the module says which.

    Factors and slopes are cut at exp(LARGEST_LOG_FACTOR) = 2e19: the norm of a float32 gradient
    could not hold the square of more, and the run would end.
    """
    student_n = floored(actions.student_n)
    reference_n = actions.teacher_n if config.to == "teacher" else actions.sampler_n
    forbidden_n = reference_n == -torch.inf
    x_n = torch.where(forbidden_n, 0.0, student_n - reference_n).detach()
    log_rho_n = (student_n - actions.sampler_n).detach()
    value_n, slope_n = ESTIMATES[config.applied_direction, config.estimator](x_n, log_rho_n)
    slope_n = torch.where(forbidden_n, 0.0, slope_n.clamp(-LARGEST, LARGEST))
    value_n = torch.where(forbidden_n, 0.0, value_n)
    pulled_n = slope_n * student_n
    return config.coefficient * (value_n + pulled_n - pulled_n.detach())


LARGEST = float(torch.tensor(LARGEST_LOG_FACTOR, dtype=torch.float64).exp())


def _factor(log_n: torch.Tensor) -> torch.Tensor:
    return log_n.clamp(max=LARGEST_LOG_FACTOR).exp()
