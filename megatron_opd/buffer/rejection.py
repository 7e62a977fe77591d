"""Why a sample leaves the pipeline without being trained on."""

from __future__ import annotations


class SampleRejected(Exception):
    """One sample cannot be used; the run goes on. `reason` is a short word that is counted.

    detail: one line for the log: which engine, which value.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class RolloutRejected(SampleRejected):
    """The student fleet returned nothing to learn from (aborted request, empty response)."""


class ScoreRejected(SampleRejected):
    """The teacher fleet returned no usable score for a rollout."""
