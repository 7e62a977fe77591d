"""Expected number of different ids in a cache, of a large vocabulary, without a draw.

m draws of the tail hit an id of share s with probability 1 - (1 - s)^m. The likeliest ids are
summed one by one; of the rest, whose shares are small, powers of s are summed once for all m:

    sum over the rest of 1 - (1 - s)^m = sum_j (-1)^(j+1) C(m, j) sum of s^j

The share of rank r is at most 1 / (r - k), so that after ORDERS powers what is left out is below
1e-8 of a sum of the rest. Axes: T prefixes, V vocabulary ranked, H its head.
"""

from __future__ import annotations

import torch

from studies.variance.exact import Split

HEAD, ORDERS = 2048, 4
_TINY, _EPS = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).eps


class Sizes:
    """Counts the different ids that a support caches at each prefix.

    Args:
        ranked_TV: float64 probabilities of the old student, falling.
    """

    def __init__(self, ranked_TV: torch.Tensor, head: int = HEAD) -> None:
        self._head_TH, rest_TV = ranked_TV[:, :head], ranked_TV[:, head:]
        self._powers = [rest_TV.pow(j).sum(-1) for j in range(1, ORDERS + 2)]

    def cached_ids(self, split: Split, mass_T: torch.Tensor, draws_T: torch.Tensor) -> torch.Tensor:
        """Return float64 [T]: selected ids, and the path's token where none of them is it.

        mass_T: of the ids after the first split.atoms. draws_T: made of them, 0 for top-k alone.
        """
        tail_TH = self._head_TH[:, split.atoms :]
        mass_T = mass_T.clamp(min=_TINY)
        log_rest_TH = torch.log1p(-(tail_TH / mass_T[:, None]).clamp(max=1 - _EPS))
        hit_TH = -torch.expm1(draws_T[:, None] * log_rest_TH)
        selected_T = hit_TH.sum(-1)
        missed_T = (tail_TH * (1 - hit_TH)).sum(-1) + self._powers[0]
        ways_T = torch.ones_like(mass_T)
        for j in range(1, ORDERS + 1):
            ways_T = -ways_T * (draws_T - (j - 1)) / j  # (-1)^j C(m, j)
            selected_T = selected_T - ways_T * self._powers[j - 1] / mass_T.pow(j)
            missed_T = missed_T + ways_T * self._powers[j] / mass_T.pow(j)
        return split.atoms + selected_T + missed_T
