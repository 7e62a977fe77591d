"""The controls that must fail: objectives with the sign of their advantage turned round."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_opd.config.objective import CustomObjective, RewardAdvantage, Use
from megatron_opd.config.supports import PathSupport, Support
from megatron_opd.config.trust import ClipTrust, Line, TrustConfig


class FlippedReverseKl(CustomObjective):
    """Moves the student away from the teacher: the loss is + sum_k w_k rho_k sg(A_k)."""

    source: ClassVar[str] = "a control of studies/findings"

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        return [("loss per token", "L_t = + sum_k w_k r_k sg(log q_k - log p_k)")]

    def bias(self, use: Use) -> list[str]:
        """Lists what biases its gradient besides support and correction."""
        return ["its sign: a study in which it does not fail is broken"]

    def loss(self, estimator: Any, cache: Any, limit: Any) -> Any:
        """Returns the loss of every token of a mini-batch's draw cache."""
        from megatron_opd.losses.terms import policy_gradient

        actions = cache.selected()
        advantage_n = (actions.student_n - actions.teacher_n).detach()
        return policy_gradient(self.trust_region, estimator, cache, actions, advantage_n, limit)


class FlippedGrpo(CustomObjective):
    """Makes the responses of a group likelier that were rewarded less: GRPO with -A."""

    source: ClassVar[str] = "a control of studies/findings"
    default_support: ClassVar[Support] = PathSupport()
    reads_reward: ClassVar[bool] = True
    trust: TrustConfig = ClipTrust()
    """Trust region on the ratio; it bounds how far one batch moves the student."""

    @property
    def trust_region(self) -> TrustConfig:
        """Returns what bounds how far one batch moves the student."""
        return self.trust

    @property
    def reward_advantage(self) -> RewardAdvantage:
        """Returns how a response's advantage follows from rewards."""
        return "group_std"

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        return [("loss per token", f"L_t = - {use.kappa('t')}{self.trust.text('r_t', '(-A)')}")]

    def bias(self, use: Use) -> list[str]:
        """Lists what biases its gradient besides support and correction."""
        return ["its sign: a study in which it does not fail is broken"]

    def loss(self, estimator: Any, cache: Any, limit: Any) -> Any:
        """Returns the loss of every token of a mini-batch's draw cache."""
        from megatron_opd.losses.terms import policy_gradient

        advantage_T = -cache.advantage_B[cache.sample_T]
        return policy_gradient(self.trust, estimator, cache, cache.path(), advantage_T, limit)
