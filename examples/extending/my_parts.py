"""A user's own objective, verifier and prompts, named in a configuration by import path.

objective: {type: "my_parts:SquaredGap", scale: 0.5}
data: {train: "my_parts:sums", task: "my_parts:ends_with_answer"}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from megatron_opd.config.objective import CustomObjective, Use
from megatron_opd.config.section import PositiveFloat


class SquaredGap(CustomObjective):
    """Minimises the squared gap of log-probs on the cached ids: scale * (log p - log q)^2 / 2."""

    source: ClassVar[str] = "examples/extending"
    scale: PositiveFloat = 1.0
    """Multiplies the loss."""

    def formula(self, use: Use) -> list[tuple[str, str]]:
        """Lists the lines of its formula: label and text."""
        return [("loss per token", f"L_t = {self.scale:g} sum_k w_k (log p_k - sg(log q_k))^2 / 2")]

    def bias(self, use: Use) -> list[str]:
        """Lists what biases its gradient besides support and correction."""
        return ["a distance on the sampler's ids, whatever the student's probability of them"]

    def is_direct(self, use: Use) -> bool:
        """Whether no ratio is corrected: it is differentiated through the student."""
        return True

    def loss(self, estimator: Any, cache: Any, limit: Any) -> Any:
        """Returns the loss of every token of a mini-batch's draw cache."""
        from megatron_opd.losses.terms import unweighed

        actions = cache.selected()
        gap_n = actions.student_n - actions.teacher_n.detach()
        loss_n = self.scale * actions.weight_n * gap_n.square() / 2
        return unweighed(cache.per_token(loss_n, actions.row_n))


def ends_with_answer(response: str, answer: str) -> bool:
    """Whether the response's last word is the answer."""
    return response.split()[-1:] == [answer]


def sums() -> Iterator[dict[str, str]]:
    """Yields the rows of a prompt file: the same ones every time, so that a run can be resumed."""
    for first in range(100):
        yield {"prompt": f"{first} + 1 = ", "answer": str(first + 1)}
