"""Defines what an evaluation of one set reports."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class TurnMeans:
    """Counts what happened in trajectories, as means of all of them.

    mean_call_errors: of the tool calls, those that could not be made as they were written.
    """

    mean_turns: float
    mean_tool_calls: float
    mean_call_errors: float


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Reports avg@k and pass@k with their uncertainty. An answer is a completion or a trajectory.

    accuracy_pct: 100 times the mean over problems of (right answers / k) (AsyncOPD Eq. 14).
    stderr_pct: standard error of that mean over problems (estimates.py; nan for one problem): the k
    answers to a problem are not independent. mean_response_tokens: sampled, of all turns.
    truncated_pct: answers that ended at the limit of tokens, or at another of their trajectory.
    mean_reward: over all answers, in [0, 1] where verifiers judge; one is right from 1 on.
    verifier_failures: answers without a judgement, which count as wrong, by the reason: that of a
    verifier, or of an environment. pass_at_k, pass_at_k_stderr_pct: percent by k (estimates.py).
    version_min, version_max: oldest and newest weights that sampled an answer; None: unknown.
    turns: of trajectories; None without an environment.
    """

    accuracy_pct: float
    stderr_pct: float
    problems: int
    samples: int
    mean_response_tokens: float
    truncated_pct: float
    mean_reward: float
    verifier_failures: dict[str, int]
    pass_at_k: dict[int, float] = field(default_factory=dict[int, float])
    pass_at_k_stderr_pct: dict[int, float] = field(default_factory=dict[int, float])
    version_min: int | None = None
    version_max: int | None = None
    turns: TurnMeans | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as JSON holds them: nan is None, and k is text.

        Those of `turns` stand among them, and are left out without an environment.
        """
        found = asdict(self)
        turns = found.pop("turns")
        return json_of(found if turns is None else found | turns)

    def line(self) -> str:
        """Return one line for the terminal."""
        largest = max(self.pass_at_k, default=1)
        passes = f"pass@{largest} {self.pass_at_k[largest]:.1f}%, " if largest > 1 else ""
        return (
            f"avg@{self.samples} {self.accuracy_pct:.1f}% +- {self.stderr_pct:.1f} on "
            f"{self.problems} problems, {passes}{self.mean_response_tokens:.1f} tokens a response, "
            f"{self._turns_line()}{self.truncated_pct:.1f}% truncated{self._failures_line()}"
        )

    def _turns_line(self) -> str:
        turns = self.turns
        if turns is None:
            return ""
        calls = f" with {turns.mean_tool_calls:.1f} tool calls ({turns.mean_call_errors:.1f} wrong)"
        with_calls = calls if turns.mean_tool_calls else ""
        return f"{turns.mean_turns:.1f} turns{with_calls}, mean reward {self.mean_reward:.3g}, "

    def _failures_line(self) -> str:
        failures = self.verifier_failures.items()
        return "".join(f", {count} counted as wrong: {reason}" for reason, count in failures)


def json_of(value: Any) -> Any:
    """Return nested fields as JSON holds them: nan becomes None, keys become text."""
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return {str(key): json_of(each) for key, each in items}
    return None if isinstance(value, float) and math.isnan(value) else value
