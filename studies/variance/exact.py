"""Variances by enumeration: no sampling error, any support, loss and gradient.

At one prefix the estimate is the sum over the cache of w f(a), f(a) = -rho(a) (log q(a) -
log p(a)), rho = p / o (AsyncOPD Eq. 15); p the student now, o the old one that drew, q the teacher.
Its gradient with respect to the current logits is the sum of w f(a) (e_a - p), whose variance is
the trace of its covariance. k atoms are exact, m draws come from the tail of mass M:

    Var = (M E_tail[f^2] - E_tail[f]^2) / m,   E_tail[g] = sum over the tail of o g

k = 0 is Monte Carlo. Axes: T prefixes, V vocabulary ranked by o, K numbers of atoms 0..V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """k atoms and m draws; k = 0 is plain Monte Carlo. thin: ceil(m * tail mass) draws."""

    atoms: int
    draws: int
    thin: bool = False

    @property
    def name(self) -> str:
        """mc_64, atoms_tail_16_48."""
        if self.atoms == 0:
            return f"mc_{self.draws}"
        return f"atoms_tail_{self.atoms}_{self.draws}{'_thin' if self.thin else ''}"

    @property
    def size(self) -> int:
        """Columns: k + m."""
        return self.atoms + self.draws


class Enumerated:
    """Prefixes with their three distributions, ranked, and the tail sums behind every k.

    Args:
        old_TV, now_TV, teacher_TV: log-probs; any float dtype, computed on in float64.
        most_atoms: the largest k that will be asked for.

    value_T: the exact expectation of f, KL(p || q) in nats; size_T: of |f|. entropy_T: of o, nats.
    """

    def __init__(
        self,
        old_TV: torch.Tensor,
        now_TV: torch.Tensor,
        teacher_TV: torch.Tensor,
        most_atoms: int = 64,
    ) -> None:
        old_TV, order_TV = old_TV.double().sort(dim=-1, descending=True)
        now_TV = now_TV.double().gather(1, order_TV)
        gap_TV = now_TV - teacher_TV.double().gather(1, order_TV)
        f_TV = (now_TV - old_TV).exp() * gap_TV
        self.old_TV, now_prob_TV = old_TV.exp(), now_TV.exp()
        self.value_T = (self.old_TV * f_TV).sum(-1)
        self.size_T = (self.old_TV * f_TV.abs()).sum(-1)
        self.entropy_T = -(self.old_TV * old_TV).sum(-1)
        first, second = self.old_TV * f_TV, self.old_TV * f_TV.square()
        purity_T1 = now_prob_TV.square().sum(-1, keepdim=True)
        cut = min(most_atoms, old_TV.shape[1])
        self.mass_TK = _tails(self.old_TV, cut)
        self.first_TK = _tails(first, cut)
        self.second_TK = _tails(second, cut)
        # |e_a - p|^2 = 1 - 2 p_a + |p|^2; |sum_a c_a (e_a - p)|^2 = |c|^2 - 2 C p.c + C^2 |p|^2
        self.grad_second_TK = _tails(second * (1 - 2 * now_prob_TV + purity_T1), cut)
        cross_TK = _tails(first * now_prob_TV, cut)
        self.grad_mean_TK = (
            _tails(first.square(), cut)
            - 2 * self.first_TK * cross_TK
            + self.first_TK.square() * purity_T1
        )

    def variance(self, split: Split) -> torch.Tensor:
        """float64 [T]: of the loss at each prefix; 0 where the atoms are the whole vocabulary."""
        k = split.atoms
        second_T = self.mass_TK[:, k] * self.second_TK[:, k]
        return (second_T - self.first_TK[:, k].square()).clamp(min=0) / self.draws(split)

    def gradient_variance(self, split: Split) -> torch.Tensor:
        """float64 [T]: trace of the covariance of the gradient with respect to the logits."""
        k = split.atoms
        second_T = self.mass_TK[:, k] * self.grad_second_TK[:, k]
        return (second_T - self.grad_mean_TK[:, k]).clamp(min=0) / self.draws(split)

    def draws(self, split: Split) -> torch.Tensor:
        """float64 [T]: draws made at each prefix."""
        tail_T = self.mass_TK[:, split.atoms]
        if not split.thin:
            return torch.full_like(tail_T, split.draws)
        return (split.draws * tail_T).ceil().clamp(min=1)

    def distinct_ids(self, split: Split) -> torch.Tensor:
        """float64 [T]: expected number of different ids that the support selects."""
        return split.atoms + self._hit(split).sum(-1)

    def cached_ids(self, split: Split) -> torch.Tensor:
        """float64 [T]: the same with the path's token, which is kept whether selected or not."""
        missed_TV = self.old_TV[:, split.atoms :] * (1 - self._hit(split))
        return self.distinct_ids(split) + missed_TV.sum(-1)

    def _hit(self, split: Split) -> torch.Tensor:
        """[T, V - k]: probability that a tail id is drawn at least once."""
        mass_T1 = self.mass_TK[:, split.atoms, None].clamp(min=_TINY)
        share_TV = (self.old_TV[:, split.atoms :] / mass_T1).clamp(max=1 - _EPS)
        # 1 - (1 - x)^m without cancellation at small x
        return -torch.expm1(self.draws(split)[:, None] * torch.log1p(-share_TV))


_TINY = torch.finfo(torch.float64).tiny
_EPS = torch.finfo(torch.float64).eps


def _tails(x_TV: torch.Tensor, most: int) -> torch.Tensor:
    """[T, most + 1]: sums over the ids of rank k and after, smallest first: a tail can be 1e-9."""
    rest_T1 = x_TV[:, most:].flip(1).sum(-1, keepdim=True)
    head_TK = torch.cat([rest_T1, x_TV[:, :most].flip(1)], dim=1)
    return head_TK.cumsum(1).flip(1)
