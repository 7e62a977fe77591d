"""Measures how old the training data is, in versions, on the batches that were trained on.

A token's staleness is the learner's version when it trains on it minus the version that sampled it.
A sample's is that of its oldest token; a partial rollout has tokens of more than one version.
A teacher that follows the student has one version in each sample.
"""

from __future__ import annotations

from megatron_opd.metrics.types import Histogram
from megatron_opd.records.types import Batch


class StalenessCounts:
    """Counts staleness over tokens and samples of the batches added."""

    def __init__(self) -> None:
        self.tokens = Histogram()
        self.samples = Histogram()
        self.partial_rollouts = 0
        """Samples that more than one version sampled."""

    def add(self, batch: Batch) -> None:
        """Count every response token and every sample of `batch`."""
        for sample in batch.samples:
            spans = sample.rollout.spans
            for span in spans:
                self.tokens.add(batch.version - span.version, span.stop - span.start)
            self.samples.add(batch.version - sample.rollout.oldest_version)
            self.partial_rollouts += len(spans) > 1


def teacher_staleness(batch: Batch) -> dict[str, float | int]:
    """Return how many versions behind the learner the weights were that scored; none: no column."""
    counts = Histogram()
    for sample in batch.samples:
        if sample.teacher_version is not None:
            counts.add(batch.version - sample.teacher_version)
    if counts.mean is None or counts.max is None:
        return {}
    return {
        "teacher_staleness_mean_versions": counts.mean,
        "teacher_staleness_max_versions": counts.max,
    }
