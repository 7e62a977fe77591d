"""Defines how long what is sent over a link is held back, drawn from a distribution (HeteroRL)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
