"""Measures what routing replay changed over a run, and how far it lowered the mismatch."""

from __future__ import annotations

from megatron_opd.metrics.types import Max, Mean, UpdateFigures
from megatron_opd.records.types import Batch


class RoutingTotals:
    """Counts the tokens and mismatches of updates that replayed routing.

    replayed_*, free_*: the mismatch with replay and with the learner's own routing, each over the
    same tokens: those of the updates that measured both.
    """

    def __init__(self) -> None:
        self.moved = Mean()
        self.compared_updates = 0
        self.replayed_max, self.replayed_mean = Max(), Mean()
        self.free_max, self.free_mean = Max(), Mean()

    def add(self, batch: Batch, figures: UpdateFigures) -> None:
        """Count a batch that the learner trained on."""
        if figures.routing_moved_fraction is not None:
            # Every layer routes every token that is an input, and the last one of a sample is none.
            inputs = sum(sample.rollout.num_tokens - 1 for sample in batch.samples)
            self.moved.add(figures.routing_moved_fraction, inputs)
        largest, mean = figures.probs_diff_max, figures.probs_diff_mean
        free_largest, free_mean = (
            figures.probs_diff_free_max,
            figures.probs_diff_free_mean,
        )
        if largest is None or mean is None or free_largest is None or free_mean is None:
            return
        tokens = figures.mismatch_tokens
        self.compared_updates += 1
        self.replayed_max.add(largest)
        self.replayed_mean.add(mean, tokens)
        self.free_max.add(free_largest)
        self.free_mean.add(free_mean, tokens)
