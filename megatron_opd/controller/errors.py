"""Defines the errors that stop a run."""

from __future__ import annotations


class LoopFailed(RuntimeError):
    """Reports a failed loop in one line: `loop` names it, `cause` is its exception."""

    def __init__(self, loop: str, cause: Exception) -> None:
        lines = str(cause).splitlines() or [""]
        super().__init__(f"{loop}: {type(cause).__name__}: {lines[0]}".rstrip(": "))
        self.loop, self.cause = loop, cause


class EverythingDropped(RuntimeError):
    """Reports so many dropped samples in a row, with no group scored, that more would follow."""


class LearnerDiverged(RuntimeError):
    """Reports a loss or gradient norm that is not finite; such weights are never synced."""
