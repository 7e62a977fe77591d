"""Warns when updates teach nothing: with equal rewards a run continues at a loss of 0.

Invariant: a streak of updates without a signal is reported once when it is `patience` long, and
once when it ends; every such update is counted, reported or not.
"""

from __future__ import annotations

from megatron_opd.metrics.types import UpdateFigures


class SignalWatch:
    """Counts updates that taught nothing, and reports when there are many in a row.

    Args:
        reads_groups: whether the objective compares rewards inside groups, so that equal ones teach
            nothing.
        patience: updates in a row without a signal before it is said.
    """

    def __init__(self, *, reads_groups: bool, patience: int) -> None:
        self._reads_groups, self._patience = reads_groups, patience
        self._streak = 0

    def add(
        self, figures: UpdateFigures, uniform_groups: float | None
    ) -> tuple[str | None, str | None]:
        """Return (why this update had no signal, a line for the terminal), or None for each.

        uniform_groups: share of the batch's groups whose rewards are all equal; None without
        rewards.
        """
        why = self._why(figures, uniform_groups)
        if why is not None:
            self._streak += 1
            if self._streak == self._patience:
                return why, f"nothing is learned: {self._streak} updates in a row, {why}"
            return why, None
        ended, self._streak = self._streak, 0
        if ended >= self._patience:
            return None, f"there is a signal again, after {ended} updates without one"
        return None, None

    def _why(self, figures: UpdateFigures, uniform_groups: float | None) -> str | None:
        equal = self._reads_groups and uniform_groups == 1.0
        if figures.grad_norm != 0:
            if equal:
                return (
                    "all rewards of every group are equal: advantages are 0, and what the gradient "
                    "holds comes from other terms"
                )
            return None
        if equal:
            return "all rewards of every group are equal (gradient norm 0): see data.task, answers"
        if getattr(figures, "stopped_fraction", None) == 1.0:
            return "the trust region stops every ratio (gradient norm 0): see objective.trust"
        if getattr(figures, "importance_mean", None) == 0.0:
            return "the correction masks every token (gradient norm 0): see correction.max_ratio"
        return "the gradient norm is exactly 0"
