"""Lists the reductions: how the losses of tokens become one number, chosen by `type`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from megatron_opd.config.section import PositiveInt, Section, type_or


class Reduction(Section):
    """Turns the losses of all response tokens of a mini-batch into one number."""

    def text(self) -> str:
        """Describes the reduction in one line; L_t is the loss of a token."""
        raise NotImplementedError


class TokenReduction(Reduction):
    """Averages over all response tokens of the mini-batch."""

    type: Literal["token_mean"] = "token_mean"

    def text(self) -> str:
        """Describes the reduction in one line; L_t is the loss of a token."""
        return "sum of L_t over all response tokens / their number"


class SequenceReduction(Reduction):
    """Averages over responses the mean of their tokens (GRPO and GSPO as published).

    A token of a short response weighs more.
    """

    type: Literal["sequence_mean"] = "sequence_mean"

    def text(self) -> str:
        """Describes the reduction in one line; L_t is the loss of a token."""
        return (
            "mean over responses of the mean of L_t over their tokens: a token of a short response "
            "weighs more"
        )


class FixedReduction(Reduction):
    """Averages over responses the sum of their tokens divided by a constant (Dr. GRPO)."""

    type: Literal["fixed_length"] = "fixed_length"
    length: PositiveInt = 1024
    """Divisor of a response's sum, in tokens. Raising it lowers every gradient in proportion."""

    def text(self) -> str:
        """Describes the reduction in one line; L_t is the loss of a token."""
        return f"mean over responses of the sum of L_t / {self.length}"


ReductionConfig = Annotated[
    Annotated[TokenReduction, Tag("token_mean")]
    | Annotated[SequenceReduction, Tag("sequence_mean")]
    | Annotated[FixedReduction, Tag("fixed_length")],
    Discriminator(type_or("token_mean")),
]
