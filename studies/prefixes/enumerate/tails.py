"""Sums over the vocabulary from which every support's error at a prefix follows, exactly.

At one prefix the estimate is L = sum over the cache of w f(a), f(a) = rho (log p - log q), rho =
p / o (AsyncOPD Eq. 15); its gradient with respect to the current logits is the sum of w f(a)
(e_a - p). o: the student that sampled; p: the student now; q: the teacher. With k atoms and m draws
of the tail both are unbiased, and their variances are what studies/variance/exact.py derives.

The k likeliest ids alone leave the tail out: the error is a bias, the same in every cache. As it is
(`left`), it is the tail's own sum. Divided by the sums of p and q over the set (`renormalised`),
the estimate is KL(p_A || q_A) of the distributions within the set A.

Axes: T prefixes, V vocabulary, K = len(CUTS) numbers of atoms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from studies.prefixes.enumerate.sizes import Sizes
from studies.prefixes.enumerate.supports import CUTS, TOP_K, UNBIASED, name_of
from studies.variance.exact import Enumerated, Split

Columns = dict[str, torch.Tensor]
MOST = max(CUTS)


@dataclass(frozen=True)
class Three:
    """Log-probs of the old student, the current one and the teacher: [T, V], any float type."""

    old_TV: torch.Tensor
    now_TV: torch.Tensor
    teacher_TV: torch.Tensor

    def rows(self, low: int, high: int) -> Three:
        """Return prefixes low to high - 1."""
        return Three(self.old_TV[low:high], self.now_TV[low:high], self.teacher_TV[low:high])

    def enumerated(self) -> Enumerated:
        """Return the sums of studies/variance."""
        return Enumerated(self.old_TV, self.now_TV, self.teacher_TV, most_atoms=MOST)


def pair_columns(three: Three) -> Columns:
    """Return, of each prefix, what depends on all three distributions.

    kl: KL(p || q). moved: KL(p || o). noise, gradient_noise: [T, K], variance times draws, of the
    loss and of its gradient. bias_left, bias_renormalised: [T, K], of the loss, 0 in column 0;
    gradient_bias_*: [T, K], squared length of the gradient's bias.
    """
    sums = three.enumerated()
    cuts = list(CUTS)
    found = {
        "kl": sums.value_T,
        "moved": moved(three),
        "noise": torch.stack([sums.variance(Split(k, 1)) for k in cuts], dim=1),
        "gradient_noise": torch.stack([sums.gradient_variance(Split(k, 1)) for k in cuts], dim=1),
        "bias_left": -sums.first_TK[:, cuts],
        "gradient_bias_left": sums.grad_mean_TK[:, cuts].clamp(min=0),
    }
    for name in ("bias_left", "gradient_bias_left"):
        found[name][:, 0] = 0.0
    return found | renormalised(three, sums.value_T)


def moved(three: Three) -> torch.Tensor:
    """Return float64 [T]: KL(p || o) in nats."""
    now_TV = three.now_TV.double()
    return (now_TV.exp() * (now_TV - three.old_TV.double())).sum(-1)


def renormalised(three: Three, kl_T: torch.Tensor) -> Columns:
    """Return [T, K]: bias of KL within the old student's k likeliest, and of its gradient squared.

    The gradient of KL(p || q) with respect to logit a is p_a (log p_a - log q_a - KL); within the
    set p and q are divided by their sums, and logits outside get none.
    """
    ids_TM = three.old_TV.topk(MOST, dim=-1).indices
    now_TV = three.now_TV.double()
    gap_TV = now_TV - three.teacher_TV.double()
    whole_TV = now_TV.exp() * (gap_TV - kl_T[:, None])
    squared_T = whole_TV.square().sum(-1)
    p_TM, gap_TM, whole_TM = (x.gather(1, ids_TM) for x in (now_TV.exp(), gap_TV, whole_TV))
    q_TM = (p_TM.log() - gap_TM).exp()
    biases, gradients = [torch.zeros_like(kl_T)], [torch.zeros_like(kl_T)]
    for k in CUTS[1:]:
        p_T1, q_T1 = p_TM[:, :k].sum(-1, keepdim=True), q_TM[:, :k].sum(-1, keepdim=True)
        inside_Tk = gap_TM[:, :k] - p_T1.log() + q_T1.log()
        share_Tk = p_TM[:, :k] / p_T1
        kl_T1 = (share_Tk * inside_Tk).sum(-1, keepdim=True)
        kept_Tk = whole_TM[:, :k]
        wrong_T = (share_Tk * (inside_Tk - kl_T1) - kept_Tk).square().sum(-1)
        biases.append(kl_T1[:, 0] - kl_T)
        gradients.append(wrong_T + (squared_T - kept_Tk.square().sum(-1)).clamp(min=0))
    return {
        "bias_renormalised": torch.stack(biases, dim=1),
        "gradient_bias_renormalised": torch.stack(gradients, dim=1),
    }


def old_columns(old_TV: torch.Tensor) -> Columns:
    """Return, of each prefix, what the old student alone decides.

    entropy; mass: [T, K] of the tail; cached: [T, supports], in the order of UNBIASED and TOP_K.
    """
    sums = Three(old_TV, old_TV, old_TV).enumerated()
    sizes = Sizes(sums.old_TV)
    cached = [
        sizes.cached_ids(split, sums.mass_TK[:, split.atoms], sums.draws(split))
        for split in UNBIASED
    ]
    # draws() makes at least one draw of a thin tail; top-k has none
    none_T = torch.zeros(len(old_TV), dtype=torch.float64)
    cached += [sizes.cached_ids(top, sums.mass_TK[:, top.atoms], none_T) for top in TOP_K]
    return {
        "entropy": sums.entropy_T,
        "mass": sums.mass_TK[:, list(CUTS)],
        "cached": torch.stack(cached, dim=1),
    }


SUPPORTS = tuple(name_of(split) for split in (*UNBIASED, *TOP_K))
"""Names of the columns of `cached`."""
