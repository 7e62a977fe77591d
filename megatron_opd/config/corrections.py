"""How the gap between learner and sampler is corrected, and how tokens are averaged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Tag, model_validator

from megatron_opd.config.section import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    type_or,
)


class Correction(Section):
    """How a ratio of learner to sampler weighs an action (TIS).

    Without prox the ratio is learner(now) / sampler and is the only one. With prox the correction
    is learner(batch start) / sampler, detached, and a trust region acts on learner(now) /
    learner(batch start): decoupled PPO.
    """

    prox: bool = False
    """Split the ratio at the learner's own log-probs of the batch's start."""


class NoCorrection(Correction):
    """The sampler is taken for the learner: weight 1 (with prox: plain PPO)."""

    type: Literal["none"] = "none"


class LevelledCorrection(Correction):
    """A correction by ratios."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of the action; or product, or geometric mean, of a response's token ratios."""


class ImportanceCorrection(LevelledCorrection):
    """The full ratio: unbiased, unbounded (vanilla IS; with prox decoupled PPO)."""

    type: Literal["importance"] = "importance"


class TruncatedCorrection(LevelledCorrection):
    """min(ratio, max_ratio): truncated importance sampling."""

    type: Literal["truncated"] = "truncated"
    max_ratio: PositiveFloat = 2.0
    """C."""


class MaskedCorrection(LevelledCorrection):
    """The ratio inside [min_ratio, max_ratio], 0 outside: the action is not trained on."""

    type: Literal["masked"] = "masked"
    min_ratio: NonNegativeFloat = 0.5
    """Lower edge."""
    max_ratio: PositiveFloat = 2.0
    """Upper edge."""

    @model_validator(mode="after")
    def _edges_in_order(self) -> MaskedCorrection:
        if self.min_ratio > self.max_ratio:
            raise ValueError(
                "min_ratio must be <= max_ratio, "
                f"got min_ratio={self.min_ratio}, max_ratio={self.max_ratio}"
            )
        return self


CorrectionConfig = Annotated[
    Annotated[NoCorrection, Tag("none")]
    | Annotated[ImportanceCorrection, Tag("importance")]
    | Annotated[TruncatedCorrection, Tag("truncated")]
    | Annotated[MaskedCorrection, Tag("masked")],
    Discriminator(type_or("importance")),
]


class TokenReduction(Section):
    """Mean over all response tokens of the mini-batch."""

    type: Literal["token"] = "token"


class SequenceReduction(Section):
    """Mean over responses of their tokens' mean (GRPO and GSPO as published).

    A token of a short response weighs more.
    """

    type: Literal["sequence"] = "sequence"


class FixedReduction(Section):
    """Sum of a response's tokens over a constant, mean over responses (Dr. GRPO)."""

    type: Literal["fixed"] = "fixed"
    length: PositiveInt = 1024
    """The constant, in tokens."""


ReductionConfig = Annotated[
    Annotated[TokenReduction, Tag("token")]
    | Annotated[SequenceReduction, Tag("sequence")]
    | Annotated[FixedReduction, Tag("fixed")],
    Discriminator(type_or("token")),
]
