"""Defines why a sample leaves the pipeline without being trained on."""

from __future__ import annotations


class SampleRejected(Exception):
    """Reports that one sample cannot be used while the run continues. `reason`: a word to count.

    detail: one line for the log: which engine, which value.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class SamplesLost(Exception):
    """Reports that arrays are gone with the data worker that held them: they are sampled anew."""


class TooOld(SampleRejected):
    """Reports a sound sample that came too late to be trained on; it says nothing of its prompt.

    remedy: what the user can do where all samples come so.
    """

    remedy = ""


class RolloutRejected(SampleRejected):
    """Reports that the student's servers returned nothing to learn from (aborted or empty)."""


class ScoreRejected(SampleRejected):
    """Reports that the teacher servers returned no usable score for a rollout."""
