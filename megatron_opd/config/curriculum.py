"""Defines which prompts are sampled more often than others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_opd.config.section import PositiveInt, Section

Rate = Annotated[float, Field(ge=0, le=1)]


class PassRateCurriculum(Section):
    """Samples prompts more often whose responses are sometimes right.

    A prompt's pass rate is the mean reward of its latest responses, as far as rewards were known
    when the live weights came to the servers. One that has none yet is taken.
    """

    type: Literal["pass_rate"] = "pass_rate"
    low: Rate = 0.1
    """Lowest pass rate at which a prompt is taken whenever its turn comes. Raising it leaves out
    more of what the student cannot do yet."""
    high: Rate = 0.9
    """Highest pass rate at which a prompt is taken whenever its turn comes. Lowering it leaves out
    more of what the student can do already."""
    outside: Rate = 0.2
    """Probability with which a prompt outside [low, high] is taken when its turn comes; 0: never
    again, except where a whole epoch has nothing else. Raising it notices sooner that a prompt has
    become easier or harder, and samples more of what teaches little."""
    memory: PositiveInt = 16
    """Number of responses that the rate is about the mean of: each moves it by 1 / memory of the
    difference, the first ones by 1 / their number. Raising it makes rates steadier and slower."""

    @model_validator(mode="after")
    def _is_a_band(self) -> PassRateCurriculum:
        if self.low > self.high:
            raise ValueError(f"low must be <= high, got {self.low:g} and {self.high:g}")
        return self
