"""Defines the mismatch of learner and sampler in the first updates, and a bound on it.

mismatch_limits.py has the limits of a run, why they are what they are, and what healthy runs have.
"""

from __future__ import annotations

import msgspec

SMALL = 64
MOST_RATIO = 10.0


class MismatchGap(msgspec.Struct, frozen=True):
    """Holds sums over tokens of |dp| and of k3."""

    tokens: int = 0
    abs_dp: float = 0.0
    k3_nats: float = 0.0

    def plus(self, other: MismatchGap) -> MismatchGap:
        """Return the sums over the tokens of both."""
        return MismatchGap(
            self.tokens + other.tokens, self.abs_dp + other.abs_dp, self.k3_nats + other.k3_nats
        )

    @property
    def mean_abs_dp(self) -> float:
        """Returns the mean of |dp|; 0 without tokens."""
        return self.abs_dp / max(1, self.tokens)

    @property
    def mean_k3_nats(self) -> float:
        """Returns the mean of k3; 0 without tokens."""
        return self.k3_nats / max(1, self.tokens)


class MismatchLimits(msgspec.Struct, frozen=True):
    """Holds the largest means that are no sign of different models, over many tokens."""

    mean_abs_dp: float
    mean_k3_nats: float

    def over(self, tokens: int) -> MismatchLimits:
        """Return the limits of the means over so many tokens, at least one."""
        factor = 1 + SMALL / tokens
        return MismatchLimits(factor * self.mean_abs_dp, factor * self.mean_k3_nats)

    def allow(self, gap: MismatchGap) -> bool:
        """Return whether both means are within their limits; a NaN is not."""
        if gap.tokens == 0:
            return True
        most = self.over(gap.tokens)
        within_dp = gap.mean_abs_dp <= most.mean_abs_dp
        return within_dp and gap.mean_k3_nats <= most.mean_k3_nats


class Bound(msgspec.Struct, frozen=True):
    """Tells a learner what to refuse. before: what earlier updates had, judged together with it."""

    limits: MismatchLimits
    before: MismatchGap = MismatchGap()

    def allows(self, gap: MismatchGap) -> bool:
        """Return whether an update may be made whose first mini-batch has this gap."""
        return self.limits.allow(self.before.plus(gap))


class ModelsDiffer(RuntimeError):
    """Reports a gap beyond its limits, before the optimizer step was made."""

    def __init__(self, gap: MismatchGap) -> None:
        super().__init__(
            f"learner and sampler are {gap.mean_abs_dp:.3g} apart (mean |dp|), "
            f"{gap.mean_k3_nats:.3g} nats (k3), over {gap.tokens} tokens"
        )
        self.gap = gap
