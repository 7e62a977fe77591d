"""Measures how old the training data is, in versions, on the batches that were trained on.

A token's staleness is the learner's version when it trains on it minus the version that sampled it.
A sample's is that of its oldest token; a partial rollout has tokens of more than one version.
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
