"""Defines how long what is sent over a link is held back, drawn from a distribution (HeteroRL)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_opd.config.section import NonNegativeFloat, Section

DelayType = Literal["none", "constant", "lognormal", "weibull", "exponential"]


class DelayConfig(Section):
    """Says how long a message is held back."""

    type: DelayType = "none"
    """Distribution of the delay. lognormal, weibull: 99.5% of the draws lie between low_s and
    high_s, as many below as above. exponential: low_s, and what an exponential distribution adds,
    99.5% of it up to high_s. constant: low_s."""
    low_s: NonNegativeFloat = 60.0
    """Smallest delay in seconds, but for 0.25% of the draws of lognormal and weibull."""
    high_s: NonNegativeFloat = 1800.0
    """Largest delay in seconds; longer draws are cut there."""
    time_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Multiplies every delay, so that a study of hours takes minutes: 0.0167 makes a minute a
    second."""

    @model_validator(mode="after")
    def _suits_its_type(self) -> DelayConfig:
        kind, low_s, high_s = self.type, self.low_s, self.high_s
        if low_s > high_s:
            raise ValueError(
                f"low_s must be <= high_s, got {low_s:g} and {high_s:g}; "
                "raise high_s or lower low_s"
            )
        if kind in ("lognormal", "weibull") and not 0 < low_s < high_s:
            raise ValueError(
                f"low_s must be > 0 and < high_s with type {kind}, got {low_s:g} and {high_s:g}; "
                "use type exponential, which may begin at 0, or constant"
            )
        return self
