"""Define what every objective says of itself: keys, formula, source, bias, what it reads.

CustomObjective is the base of those that users bring from outside the package; SftOnTeacher, which
learns what the teacher writes, needs no log-prob of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from megatron_opd.config.corrections import Correction, Level
from megatron_opd.config.reductions import Reduction, TokenReduction
from megatron_opd.config.section import NonNegativeFloat, Section
from megatron_opd.config.supports import McSupport, PathSupport, Support
from megatron_opd.config.trust import Line, NoTrust, TrustConfig

RewardAdvantage = Literal[
    "reward", "group_mean", "group_std", "group_std_population", "leave_one_out"
]
OpenUnit = Annotated[float, Field(gt=0, lt=1)]
Credit = Literal["trajectory", "turn"]
"""Whose reward an advantage follows from."""


@dataclass(frozen=True)
class Use:
    """Holds what an objective is used with: support, correction, whose rewards it reads."""

    support: Support
    correction: Correction
    credit: Credit = "trajectory"

    @property
    def level(self) -> Level:
        """Returns what one ratio of the correction is of."""
        return self.correction.ratio_level

    @property
    def on_set(self) -> bool:
        """Tell whether divergences are summed over the cached ids: nothing is random."""
        return self.support.is_set

    @property
    def on_teacher_draws(self) -> bool:
        """Tell whether the teacher chose the cached ids."""
        return self.support.owner == "teacher"

    def kappa(self, index: str) -> str:
        """Returns the factor as it stands in a formula, with a blank; "" where it is 1."""
        if self.correction.keeps_whole_ratio or not self.correction.corrects:
            return ""
        return f"kappa_{index} " if self.level == "token" else "kappa "

    def ratio_lines(self, index: str) -> list[Line]:
        """Says what r and kappa are. index: t for sampled tokens, k for cached actions."""
        over = {
            "token": f"rho_{index} = {{}}_{index} / o_{index}",
            "sequence": "rho = prod over the response's tokens of {}_t / o_t",
            "geometric": "rho = (prod over the response's tokens of {}_t / o_t)^(1/T)",
        }[self.level]
        if self.correction.keeps_whole_ratio:
            return [("ratio", f"r_{index} = p_{index} / o_{index}")]
        start = "p0" if self.correction.prox else "p"
        below = f"p0_{index}" if self.correction.prox else f"sg(p_{index})"
        ratio = ("ratio", f"r_{index} = p_{index} / {below}")
        if not self.correction.corrects:
            return [ratio]
        name = f"rho_{index}" if self.level == "token" else "rho"
        factor = f"{self.kappa(index).rstrip()} = {self.correction.text(name)}"
        return [ratio, ("correction", f"{factor}; {over.format(start)}")]


class Objective(Section):
    """Says what an objective reads, where it comes from, and what it is used with.

    source: papers and equations. default_support, default_reduction: taken when none is named.
    reads_reward, reads_teacher: what its loss is a function of. reads_turns: of rewards, also of
    those of turns (environment.credit). one_ratio_a_response: its trust region acts on responses,
    not tokens. replaces_ratio: it has a weight in place of p / o. imitates: it reads answers that
    the teacher wrote, and no others; every other objective reads the student's alone.
    """

    source: ClassVar[str] = ""
    default_support: ClassVar[Support] = McSupport()
    default_reduction: ClassVar[Reduction] = TokenReduction()
    reads_reward: ClassVar[bool] = False
    reads_turns: ClassVar[bool] = False
    one_ratio_a_response: ClassVar[bool] = False
    replaces_ratio: ClassVar[bool] = False
    imitates: ClassVar[bool] = False

    @property
    def trust_region(self) -> TrustConfig:
        """Returns what bounds how far one batch moves the student."""
        return NoTrust()

    @property
    def reads_teacher(self) -> bool:
        """Tell whether the loss needs the teacher's log-probs."""
        return not self.reads_reward

    @property
    def reward_advantage(self) -> RewardAdvantage | None:
        """Returns how a response's advantage follows from rewards; None where none is read."""
        return None

    @property
    def reads_groups(self) -> bool:
        """Tell whether the loss compares the responses of one prompt."""
        return self.reward_advantage not in (None, "reward")

    @property
    def reads_sampler(self) -> bool:
        """Tell whether the loss reads the sampler's log-probs besides the correction's ratio."""
        return False

    @property
    def penalises(self) -> bool:
        """Tell whether a KL penalty is added."""
        return False

    def is_direct(self, use: Use) -> bool:
        """Tell whether no ratio is corrected: it is differentiated through the student."""
        return False

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        raise NotImplementedError

    def bias(self, use: Use) -> list[str]:
        """Lists what biases its gradient besides support and correction."""
        return self.trust_region.bias()

    def sources(self, use: Use) -> list[str]:
        """Lists papers and equations, those of its trust region included."""
        return [self.source, *self.trust_region.sources()]


class CustomObjective(Objective):
    """Lets objectives come from outside the package: `type` is an import path, MODULE:CLASS.

    A subclass has its own keys, overrides `loss`, and says what it reads; docs/extending.md has an
    example.
    """

    type: str

    @property
    def reward_advantage(self) -> RewardAdvantage | None:
        """Returns what `cache.advantage_T` is: the reward itself, where rewards are read at all.

        `cache.advantage_B` is the same by response, 0 with environment.credit: turn. Override it
        for one that compares the responses of a group.
        """
        return "reward" if self.reads_reward else None

    def loss(self, estimator: Any, cache: Any, limit: Any) -> Any:
        """Returns the losses.terms.TermLoss of a mini-batch's cache (losses.cache.Cache)."""
        raise NotImplementedError

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        return [("loss per token", f"as {self.type} computes it")]

    @model_validator(mode="after")
    def _has_a_loss(self) -> CustomObjective:
        if type(self).loss is CustomObjective.loss:
            raise ValueError(f"{self.type} must define the method `loss`")
        return self


class SftOnTeacher(Objective):
    """Minimises the cross-entropy of answers that the teacher wrote: -log p of each of its tokens.

    Sequence-level distillation (Kim and Rush 2016); with on-policy terms beside it the mixture of
    GKD (arXiv 2306.13649, its lambda is 1 - share). Unbiased for KL(q || p) over answers, q the
    teacher as it is sampled: the tokens are the teacher's own, and no ratio corrects them.
    """

    source: ClassVar[str] = "arXiv 1606.07947; GKD (arXiv 2306.13649)"
    default_support: ClassVar[Support] = PathSupport()
    imitates: ClassVar[bool] = True
    type: Literal["sft_on_teacher"] = "sft_on_teacher"
    share: OpenUnit | None = None
    """Share of the prompts that the teacher answers in a mixture, in whole groups; the student
    answers the others, from which the other terms learn. null: half of them; all, where this is the
    only objective. Raising it learns more of what the teacher writes, and less on the student's own
    text."""
    temperature: NonNegativeFloat = 1.0
    """Temperature at which the teacher writes; 0: its likeliest token, always. Lower writes safer
    and less varied answers."""

    @property
    def reads_teacher(self) -> bool:
        """Tell whether the loss needs the teacher's log-probs: it needs its text alone."""
        return False

    def is_direct(self, use: Use) -> bool:
        """Tell whether no ratio is corrected: it never is."""
        return True

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        return [
            ("loss per token", "L_t = - log p_t on answers of the teacher, 0 on the student's"),
        ]
