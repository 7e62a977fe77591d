"""What stops a run."""

from __future__ import annotations


class LoopFailed(RuntimeError):
    """A loop died. `loop` names it, `__cause__` is what it died of; the text is one line."""

    def __init__(self, loop: str, cause: Exception) -> None:
        lines = str(cause).splitlines() or [""]
        super().__init__(f"{loop}: {type(cause).__name__}: {lines[0]}".rstrip(": "))
        self.loop = loop


class EverythingDropped(RuntimeError):
    """Samples were dropped in a row, all permits' worth, and no group was scored in full."""


class LearnerDiverged(RuntimeError):
    """The learner's loss or gradient norm is not finite; such weights are never published."""
