"""The objective: a pure function of log-prob tensors.

Axis N: (response token, cached action) pairs of the draw cache, rows one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_opd.losses.estimators import reverse_kl_surrogate
from megatron_opd.losses.reduction import weighted_sum


@dataclass(frozen=True)
class Objective:
    """loss_sum: differentiable float64 scalar, summed over tokens.

    reverse_kl_sum: float64, sum of weight * rho * (student_logp - teacher_logp), rho untruncated:
    an unbiased estimate of the summed KL(student || teacher) in nats. truncated_weight: weight of
    the actions whose ratio was truncated.
    """

    loss_sum: torch.Tensor
    reverse_kl_sum: torch.Tensor
    truncated_weight: torch.Tensor


def reverse_kl(
    student_logp_N: torch.Tensor,
    sampler_logp_N: torch.Tensor,
    teacher_logp_N: torch.Tensor,
    weight_N: torch.Tensor,
    *,
    max_ratio: float | None = None,
) -> Objective:
    """loss_t = -sum_k weight_k rho(a_k) sg(A(a_k)), summed over t (AsyncOPD Eq. 7 and sec. 6).

    sampler_logp is of the true sampling distribution (temperature, top-p); student_logp must be of
    the same temperature. Divide by the global number of response tokens for the mean.
    """
    drawn_N = weight_N > 0
    # Entries that no draw hit leave before any arithmetic: 0 * inf would be nan in the gradient.
    student_N = student_logp_N[drawn_N]
    sampler_N, teacher_N = sampler_logp_N[drawn_N], teacher_logp_N[drawn_N]
    drawn_weight_N = weight_N[drawn_N]
    term_N = reverse_kl_surrogate(student_N, sampler_N, teacher_N, max_ratio)
    with torch.no_grad():
        ratio_N = (student_N - sampler_N).exp()
        gap_N = student_N - teacher_N
        truncated = (
            student_N.new_zeros(())
            if max_ratio is None
            else drawn_weight_N[ratio_N > max_ratio].sum()
        )
        kl_sum = weighted_sum(ratio_N * gap_N, drawn_weight_N)
    return Objective(weighted_sum(term_N, drawn_weight_N), kl_sum, truncated.double())
