"""Define what every objective says of itself: keys, formula, source, bias, what it reads."""

from __future__ import annotations

from typing import ClassVar, Literal

from megatron_opd.config.reductions import Reduction, TokenReduction
from megatron_opd.config.section import Section
from megatron_opd.config.supports import McSupport, Support
from megatron_opd.config.trust import Line, NoTrust, TrustConfig
from megatron_opd.config.use import Use

RewardAdvantage = Literal[
    "reward", "group_mean", "group_std", "group_std_population", "leave_one_out"
]


class Objective(Section):
    """Says what an objective reads, where it comes from, and what it is used with.

    source: papers and equations. default_support, default_reduction: taken when none is named.
    reads_reward, reads_teacher: what its loss is a function of. one_ratio_a_response: its trust
    region acts on responses, not tokens. replaces_ratio: it has a weight in place of p / o.
    """

    source: ClassVar[str] = ""
    default_support: ClassVar[Support] = McSupport()
    default_reduction: ClassVar[Reduction] = TokenReduction()
    reads_reward: ClassVar[bool] = False
    one_ratio_a_response: ClassVar[bool] = False
    replaces_ratio: ClassVar[bool] = False

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
