"""Adds up a mini-batch over micro-batches and ranks: one vector of sums, one of maxima.

One fixed layout, so that ranks that compute no logits can join the reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_opd.losses.diagnostics import NAMES
from megatron_opd.losses.ratios import NUM_BINS, ratio_quantile
from megatron_opd.metrics.mismatch_gap import MismatchGap

SUMS = (
    "loss",
    "count",
    "tokens",
    "ids",
    "entropy",
    "entropy_tokens",
    "mismatch",
    "mismatch_k3",
    "mismatch_tokens",
    "routing_moved",
    "routing_pairs",
    "routing_choices_moved",
    "routing_choices",
    *NAMES,
)
MAXIMA = ("mismatch", "log_ratio")


@dataclass(frozen=True)
class Mismatch:
    """Measures |p_learner - p_sampler| (TIS) over `gap.tokens` path tokens; None: no tokens."""

    max_abs_dp: float | None
    gap: MismatchGap

    @property
    def mean_abs_dp(self) -> float | None:
        """Returns the mean of |dp|."""
        return self.gap.mean_abs_dp if self.gap.tokens else None

    @property
    def mean_k3_nats(self) -> float | None:
        """Returns the mean of k3, see metrics/mismatch_limits.py."""
        return self.gap.mean_k3_nats if self.gap.tokens else None


@dataclass(frozen=True)
class Totals:
    """Holds float64 vectors; sums: [len(SUMS) + NUM_BINS], the importance-ratio histogram last.

    count: what the loss is divided by (losses/reduction.py). The rest: losses/diagnostics.py.
    """

    sums: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Totals:
        """Return the neutral element of addition."""
        return cls(
            torch.zeros(len(SUMS) + NUM_BINS, dtype=torch.float64, device=device),
            torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device),
        )

    @classmethod
    def of(
        cls,
        device: torch.device,
        *,
        sums: Mapping[str, torch.Tensor | float],
        maxima: Mapping[str, torch.Tensor | float] | None = None,
        ratios: torch.Tensor | None = None,
    ) -> Totals:
        """Copy the values (the schedule scales the loss in place); absent ones are neutral."""
        totals = cls.zero(device)
        for names, vector, values in (
            (SUMS, totals.sums, sums),
            (MAXIMA, totals.maxima, maxima or {}),
        ):
            for name, value in values.items():
                place = vector[names.index(name)]
                if isinstance(value, torch.Tensor):
                    place.copy_(value.detach())
                else:  # a number that is assigned to one place is copied there, and waited for
                    place.fill_(value)
        if ratios is not None:
            totals.sums[len(SUMS) :] = ratios
        return totals

    def plus(self, other: Totals) -> Totals:
        """Return the sum of two totals."""
        return Totals(self.sums + other.sums, self.maxima.maximum(other.maxima))

    def on_host(self) -> Totals:
        """Return the totals where the host reads them without asking the device; one copy."""
        both = torch.cat([self.sums, self.maxima]).cpu()
        return Totals(both[: len(self.sums)], both[len(self.sums) :])

    def count(self) -> torch.Tensor:
        """Return what the loss is divided by, an int32 scalar on the device."""
        return self.sums[SUMS.index("count")].to(torch.int)

    def sum(self, name: str) -> float:
        """Return one sum by name."""
        return float(self.sums[SUMS.index(name)])

    def mean(self, name: str, count: str) -> float | None:
        """Return one sum over another; None when nothing was counted."""
        counted = self.sum(count)
        return self.sum(name) / counted if counted else None

    def moments(self, name: str) -> tuple[float | None, float | None]:
        """Return mean and variance of a weight, as the cache weighs actions; None without any."""
        mean = self.mean(name, "importance_weight")
        squared = self.mean(f"{name}_squared", "importance_weight")
        return mean, None if mean is None or squared is None else max(squared - mean**2, 0.0)

    def max(self, name: str) -> float:
        """Return one maximum; -inf when nothing was measured."""
        return float(self.maxima[MAXIMA.index(name)])

    def mismatch(self) -> Mismatch:
        """Return how far learner and sampler are apart."""
        tokens = int(self.sum("mismatch_tokens"))
        largest = self.max("mismatch") if tokens else None
        return Mismatch(largest, MismatchGap(tokens, self.sum("mismatch"), self.sum("mismatch_k3")))

    def ratio_quantile(self, quantile: float) -> float:
        """Return a quantile of the importance ratio, weighted as in the draw cache."""
        return ratio_quantile(self.sums[len(SUMS) :], quantile)
