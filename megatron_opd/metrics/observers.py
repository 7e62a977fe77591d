"""Passes what happens in a run on to everything that watches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from megatron_opd.metrics.types import Accounting, Depths, UpdateFigures, WeightSyncReport
from megatron_opd.records.types import AnyRollout, AnySample, Batch, Prompt


class RunObserver:
    """Watches a run (controller/ports.py) and does nothing; a subclass overrides what it needs."""

    def started(self, now_s: float, depths: Depths) -> None:
        """Take note that the loops are about to start."""

    def admitted(self, prompt: Prompt) -> None:
        """Take note of a prompt that took a permit."""

    def rolled_out(self, rollout: AnyRollout) -> None:
        """Take note of a finished rollout."""

    def scored(self, sample: AnySample, started_s: float, finished_s: float) -> None:
        """Take note of a scored rollout."""

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """Take note of a dropped sample."""

    def trained(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """Take note of an update."""

    def updated(self, batch: Batch, depths: Depths) -> None:
        """Take note that no weight sync follows the update on `batch`."""

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """Take note that the version that `batch` produced is live."""

    def moved(self, depths: Depths) -> None:
        """Take note of how full the pipeline is."""

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Take note of an evaluated set, also before and after the updates."""

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """Take note that the loops have ended."""

    def close(self) -> None:
        """Close files, once nothing is evaluated; safe to call twice."""


class Observers(RunObserver):
    """Tells each observer everything, in order; `ended` and `close` whatever another raises."""

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = tuple(observers)

    def started(self, now_s: float, depths: Depths) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.started(now_s, depths)

    def admitted(self, prompt: Prompt) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.admitted(prompt)

    def rolled_out(self, rollout: AnyRollout) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.rolled_out(rollout)

    def scored(self, sample: AnySample, started_s: float, finished_s: float) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.scored(sample, started_s, finished_s)

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.dropped(uid, reason, detail)

    def trained(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.trained(batch, figures, started_s, finished_s)

    def updated(self, batch: Batch, depths: Depths) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.updated(batch, depths)

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.weights_synced(batch, report, depths)

    def moved(self, depths: Depths) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.moved(depths)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Tell each observer."""
        for each in self._observers:
            each.evaluated(row)

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """Tell each, whatever another one raises."""
        with ExitStack() as ending:
            for each in reversed(self._observers):  # the last callback is called first
                ending.callback(each.ended, accounting, now_s)

    def close(self) -> None:
        """Close each, whatever another one raises."""
        with ExitStack() as closing:
            for each in reversed(self._observers):
                closing.callback(each.close)
