"""Lists the corrections of the gap between learner and sampler, one small section each.

Symbols in texts: p the student now, o the sampler, p0 the student at the batch's start (prox), rho
a ratio of learner to sampler, sg stop-gradient.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Tag, model_validator

from megatron_opd.config.section import NonNegativeFloat, PositiveFloat, Section, type_or

Level = Literal["token", "sequence", "geometric"]


class Correction(Section):
    """Says how a ratio of learner to sampler weighs an action (TIS).

    Without prox the ratio is learner(now) / sampler and is the only one. With prox the correction
    is learner(batch start) / sampler, detached, and a trust region acts on learner(now) /
    learner(batch start): decoupled PPO. corrects: whether any ratio weighs an action. cuts: the
    correction changes the ratio, so that it is no longer a policy's.
    """

    corrects: ClassVar[bool] = True
    cuts: ClassVar[bool] = False
    source: ClassVar[str] = "TIS"

    prox: bool = False
    """Split the ratio at the learner's own log-probs of the batch's start (decoupled PPO). Costs
    one more forward pass over every mini-batch but the first."""

    @property
    def ratio_level(self) -> Level:
        """Returns what one ratio is of: a token or a whole response."""
        return "token"

    @property
    def keeps_whole_ratio(self) -> bool:
        """Tell whether the loss is weighed by the token's full, differentiable ratio p / o."""
        return False

    def text(self, rho: str) -> str:
        """Describes the factor made of the ratio `rho`."""
        return f"sg({rho})"

    def bias(self) -> list[str]:
        """Lists what the correction biases the gradient by."""
        return []


class NoCorrection(Correction):
    """Takes the sampler for the learner: weight 1 (with prox: plain PPO)."""

    corrects: ClassVar[bool] = False
    source: ClassVar[str] = ""
    type: Literal["none"] = "none"

    def bias(self) -> list[str]:
        """Lists what the correction biases the gradient by."""
        return ["o is taken for p0" if self.prox else "o is taken for p"]


class LevelledCorrection(Correction):
    """Corrects by ratios of tokens or of whole responses."""

    level: Level = "token"
    """What one ratio is of: token is the action's own; sequence is the product and geometric the
    geometric mean of a response's token ratios. sequence varies by far the most."""

    @property
    def ratio_level(self) -> Level:
        """Returns what one ratio is of: a token or a whole response."""
        return self.level


class ImportanceCorrection(LevelledCorrection):
    """Weighs by the full ratio: unbiased, unbounded (vanilla IS; with prox decoupled PPO)."""

    source: ClassVar[str] = ""
    type: Literal["importance"] = "importance"

    @property
    def keeps_whole_ratio(self) -> bool:
        """Tell whether the loss is weighed by the token's full, differentiable ratio p / o."""
        return self.level == "token" and not self.prox


class TruncatedCorrection(LevelledCorrection):
    """Weighs by min(ratio, max_ratio): truncated importance sampling."""

    cuts: ClassVar[bool] = True
    type: Literal["truncated"] = "truncated"
    max_ratio: PositiveFloat = 2.0
    """Largest importance ratio (C in TIS); larger ratios are clipped to it. Lowering it means less
    variance and more bias."""

    def text(self, rho: str) -> str:
        """Describes the factor made of the ratio `rho`."""
        return f"sg(min({rho}, {self.max_ratio:g}))"

    def bias(self) -> list[str]:
        """Lists what the correction biases the gradient by."""
        return [f"weight beyond {self.max_ratio:g} is cut, towards o"]


class MaskedCorrection(LevelledCorrection):
    """Weighs by the ratio inside [min_ratio, max_ratio]; outside, the action is not trained on."""

    cuts: ClassVar[bool] = True
    type: Literal["masked"] = "masked"
    min_ratio: NonNegativeFloat = 0.5
    """Smallest importance ratio that is trained on. Raising it drops more actions that the learner
    has become less likely to take."""
    max_ratio: PositiveFloat = 2.0
    """Largest importance ratio that is trained on. Lowering it drops more actions that the learner
    has become likelier to take: less variance, more bias."""

    @model_validator(mode="after")
    def _edges_in_order(self) -> MaskedCorrection:
        if self.min_ratio > self.max_ratio:
            raise ValueError(
                "min_ratio must be <= max_ratio, "
                f"got min_ratio={self.min_ratio}, max_ratio={self.max_ratio}"
            )
        return self

    def text(self, rho: str) -> str:
        """Describes the factor made of the ratio `rho`."""
        return f"sg({rho}) if {self.min_ratio:g} <= {rho} <= {self.max_ratio:g}, else 0"

    def bias(self) -> list[str]:
        """Lists what the correction biases the gradient by."""
        edges = f"[{self.min_ratio:g}, {self.max_ratio:g}]"
        return [f"actions of ratio outside {edges} are left out"]


CorrectionConfig = Annotated[
    Annotated[NoCorrection, Tag("none")]
    | Annotated[ImportanceCorrection, Tag("importance")]
    | Annotated[TruncatedCorrection, Tag("truncated")]
    | Annotated[MaskedCorrection, Tag("masked")],
    Discriminator(type_or("importance")),
]
