"""Variance of every support with truncated ratios, and the bias that truncation brings.

f(a) = min(rho, C) (log p - log q); all else is as in enumerate/tails.py. Whatever the support, the
estimate's expectation is off by sum of o (min(rho, C) - rho) (log p - log q). Axes: T prefixes, V
vocabulary ranked by o, K = len(CUTS) numbers of atoms.
"""

from __future__ import annotations

import torch

from studies.prefixes.enumerate.supports import CUTS
from studies.prefixes.enumerate.tails import Columns, Three
from studies.prefixes.enumerate.walk import Tree, chunks, logp, packed

MAX_RATIO = 2.0  # examples/smollm2/distil.yaml


def measure_truncated(old: torch.Tensor, now: torch.Tensor, teacher: torch.Tensor) -> Tree:
    """Return the columns of a row, of three models' logits [T, V]."""
    return packed(
        [
            truncated_columns(Three(logp(old[rows]), logp(now[rows]), logp(teacher[rows])))
            for rows in chunks(old)
        ]
    )


def truncated_columns(three: Three, max_ratio: float = MAX_RATIO) -> Columns:
    """Return noise, gradient_noise [T, K] and cut_bias, cut_gradient_bias (squared length) [T]."""
    old_TV, order_TV = three.old_TV.double().sort(dim=-1, descending=True)
    now_TV = three.now_TV.double().gather(1, order_TV)
    gap_TV = now_TV - three.teacher_TV.double().gather(1, order_TV)
    o_TV, p_TV = old_TV.exp(), now_TV.exp()
    ratio_TV = (now_TV - old_TV).exp()
    f_TV = ratio_TV.clamp(max=max_ratio) * gap_TV
    first_TV, second_TV = o_TV * f_TV, o_TV * f_TV.square()
    purity_T1 = p_TV.square().sum(-1, keepdim=True)
    second_gradient_TV = second_TV * (1 - 2 * p_TV + purity_T1)  # |e_a - p|^2
    mass_TK, first_TK, cross_TK, squared_TK = (
        tails(x) for x in (o_TV, first_TV, first_TV * p_TV, first_TV.square())
    )
    mean_gradient_TK = squared_TK - 2 * first_TK * cross_TK + first_TK.square() * purity_T1
    excess_TV = first_TV - p_TV * gap_TV
    bias_T = excess_TV.sum(-1)
    shared_T = bias_T * (2 * (excess_TV * p_TV).sum(-1) - bias_T * purity_T1[:, 0])
    return {
        "noise": (mass_TK * tails(second_TV) - first_TK.square()).clamp(min=0),
        "gradient_noise": (mass_TK * tails(second_gradient_TV) - mean_gradient_TK).clamp(min=0),
        "cut_bias": bias_T,
        "cut_gradient_bias": (excess_TV.square().sum(-1) - shared_T).clamp(min=0),
    }


def tails(x_TV: torch.Tensor) -> torch.Tensor:
    """Return [T, K]: sums over the ids after the first k, each tail by itself, smallest first."""
    falling_TV = x_TV.flip(1)
    size = x_TV.shape[1]
    return torch.stack([falling_TV[:, : size - k].sum(-1) for k in CUTS], dim=1)
