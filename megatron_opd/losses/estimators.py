"""Per-action terms of the distillation objectives. Axis N: (token, cached action) pairs."""

from __future__ import annotations

import torch

from megatron_opd.losses.importance import importance_ratio


def reverse_kl_surrogate(
    student_logp_N: torch.Tensor,
    sampler_logp_N: torch.Tensor,
    teacher_logp_N: torch.Tensor,
    max_ratio: float | None,
) -> torch.Tensor:
    """-rho(a) sg(A(a)), A(a) = teacher_logp(a) - student_logp(a) (AsyncOPD Eq. 7, no clipping).

    Weighted by the draw cache and summed over a row, its expectation is KL(student || teacher) of
    that position and its gradient's expectation is the KL's gradient (AsyncOPD Eq. 3; the term of
    grad A vanishes by the score-function identity). Unbiased for any sampler that covers the
    student; biased once max_ratio truncates.
    """
    advantage_N = (teacher_logp_N - student_logp_N).detach()
    return -importance_ratio(student_logp_N, sampler_logp_N, max_ratio) * advantage_N
