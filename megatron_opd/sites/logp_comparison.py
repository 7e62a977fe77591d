"""Compares the log-probs that each site reports with those of the other sites.

A site that reports other log-probs than it sampled with may stay within all bounds. Prompts are
given to sites by who has a free slot, so the responses that two sites sampled with the same version
are draws of the same kind, and so are their mean log-probs a token. They are compared by ranks
(Mann-Whitney), version by version, the counts of all versions added (van Elteren with equal
weights):

    U_v = number of pairs (a of the site, b of the others) with a > b, half of those with a = b
    z = sum_v (U_v - m n / 2) / sqrt(sum_v m n (m + n + 1) / 12)      m, n: how many of each

One response of each group is looked at, as those of one prompt are alike. A site that is slow has
fewer long responses of a version, which moves z without any fault: so two sites differ only if the
typical gap is large as well, in nats a token, and neither has fewer than MIN_COMPARED responses. A
site that differs from more than half of the others, of two at least, is at fault.

What this cannot see: a gap below GAP_NATS, log-probs that are wrong for few tokens, a site that
shares no version with others, which of two sites is at fault, and faulty sites that agree and are
as many as sound ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

MIN_COMPARED = 32
"""Responses of each of two sites that are compared before anything is said."""
Z = 6.0
"""Distance of ranks, in standard deviations; without a fault it is reached once in 1e9 times."""
GAP_NATS = 0.3
"""Distance of the medians, in nats a token."""
LEAST_OTHERS = 2
"""Other sites that a site must be compared with; of two alone nobody can say which is at fault."""
KEPT_VERSIONS = 16
KEPT_RESPONSES = 128
"""Newest responses of a site and version that are compared."""


class LogpComparison:
    """Compares the mean log-prob a token of each site's responses with the other sites'."""

    def __init__(self) -> None:
        self._by_version: OrderedDict[int, dict[str, list[float]]] = OrderedDict()

    def add(self, site: str, version: int, logp: float) -> None:
        """Take one response that was sampled with one version. logp: mean over its tokens."""
        sites = self._by_version.setdefault(version, {})
        found = sites.setdefault(site, [])
        found.append(logp)
        del found[:-KEPT_RESPONSES]
        while len(self._by_version) > KEPT_VERSIONS:
            del self._by_version[min(self._by_version)]

    def forget(self, site: str) -> None:
        """Let a site's responses count no more, as it was found to be faulty."""
        for sites in self._by_version.values():
            sites.pop(site, None)

    def fault_of(self, site: str) -> str | None:
        """Return in one line why a site's log-probs cannot be those it samples with, or None."""
        others = {name for sites in self._by_version.values() for name in sites} - {site}
        found = [gap for gap in (self.gap(site, other) for other in others) if gap is not None]
        far = [gap for gap in found if gap.is_far]
        if len(found) < LEAST_OTHERS or 2 * len(far) <= len(found):
            return None
        nats = float(np.median([gap.nats for gap in far]))
        return (
            f"its log-probs are {nats:+.2f} nats a token from those of {len(far)} of {len(found)} "
            "other sites with the same weights"
        )

    def gap(self, site: str, other: str) -> SiteGap | None:
        """Compare two sites; None: they have too few responses of the same versions."""
        above = variance = 0.0
        mine: list[float] = []
        theirs: list[float] = []
        for sites in self._by_version.values():
            a, b = sites.get(site, []), sites.get(other, [])
            m, n = len(a), len(b)
            if m and n:
                above += _pairs_above(a, b) - m * n / 2
                variance += m * n * (m + n + 1) / 12
                mine += a
                theirs += b
        if min(len(mine), len(theirs)) < MIN_COMPARED:
            return None
        return SiteGap(above / math.sqrt(variance), float(np.median(mine) - np.median(theirs)))


@dataclass(frozen=True, slots=True)
class SiteGap:
    """Says how far the log-probs of two sites are apart: in ranks, and in nats a token."""

    z: float
    nats: float

    @property
    def is_far(self) -> bool:
        """Returns whether one of the two must be at fault."""
        return abs(self.z) >= Z and abs(self.nats) >= GAP_NATS


def _pairs_above(a: list[float], b: list[float]) -> float:
    """Return U: pairs in which that of `a` is larger, and half of those that are equal."""
    ordered = np.sort(b)
    below = np.searchsorted(ordered, a, side="left")
    through = np.searchsorted(ordered, a, side="right")
    return float((below + through).sum() / 2)
