"""Old-to-current importance ratios."""

from __future__ import annotations

import torch


def importance_ratio(
    student_logp_N: torch.Tensor, sampler_logp_N: torch.Tensor, max_ratio: float | None
) -> torch.Tensor:
    """exp(student_logp - sampler_logp), gradient ratio * grad(student_logp) (AsyncOPD Eq. 5).

    max_ratio: C; the coefficient becomes min(rho, C), and so does that of the gradient (TIS: a
    truncated weight, not a clipped objective, so that no action loses its gradient). Unbiased for
    E under the current student while no rho exceeds C; biased towards the sampler beyond.
    """
    ratio_N = (student_logp_N - sampler_logp_N).exp()
    if max_ratio is None:
        return ratio_N
    detached_N = ratio_N.detach()
    return ratio_N * torch.where(detached_N > max_ratio, max_ratio / detached_N, 1.0)
