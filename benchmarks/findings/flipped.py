"""The control that must fail: reverse KL with the sign of its advantage turned round."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_opd.config.custom import CustomObjective
from megatron_opd.config.trust import Line
from megatron_opd.config.use import Use


class FlippedReverseKl(CustomObjective):
    """Moves the student away from the teacher: the loss is + sum_k w_k rho_k sg(A_k)."""

    source: ClassVar[str] = "a control of benchmarks/findings"

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
