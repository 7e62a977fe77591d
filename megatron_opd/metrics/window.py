"""Measures each window, the time from one weight sync to the next, as verl's async trainer does.

A sample is stale when an earlier version than the live one sampled some of it, and partial when
several did. The learner is idle while it neither trains nor takes part in a weight sync; the
samplers are while no prompt waits for a rollout or is in one, and while they are paused.

Source: verl, fully asynchronous policy trainer, "Key Metrics".
"""

from __future__ import annotations

from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.metrics.types import Depths, WeightSyncReport
from megatron_opd.records.types import Batch

COLUMNS = (
    "window_updates",
    "window_stale_samples",
    "window_stale_prompts",
    "window_partial_samples",
    "window_partial_ratio",
    "window_partial_span_max",
    "window_learner_idle_ratio",
    "window_sampler_idle_ratio",
)


class SyncWindow:
    """Counts what happens between two weight syncs.

    Args:
        group_size: responses of a prompt.
        version: live at its begin.
        now_s: when it begins, on the event loop's clock.
    """

    def __init__(self, group_size: int, version: int, now_s: float) -> None:
        self._group_size = group_size
        self._empty_since_s: float | None = now_s
        self.stale_samples = self.stale_prompts = 0
        """Counts over all windows that have ended."""
        self._begin(version, now_s)

    def trained(self, batch: Batch, started_s: float, finished_s: float) -> None:
        """Count an update."""
        started_s = max(started_s, self._began_s)
        self._learner.add(started_s, max(started_s, finished_s))
        self._done_s = finished_s
        self._updates += 1
        rollouts = [sample.rollout for sample in batch.samples]
        stale = [r.prompt.uid for r in rollouts if r.oldest_version < self._version]
        self._stale += len(stale)
        self._stale_prompts += len({uid // self._group_size for uid in stale})
        self._samples += len(rollouts)
        for rollout in rollouts:
            span = rollout.spans[-1].version - rollout.oldest_version
            self._partial += span > 0
            self._span_max = max(self._span_max, span)

    def moved(self, depths: Depths, now_s: float) -> None:
        """Note whether anything waits for a rollout or is in one."""
        if depths.rolling and self._empty_since_s is not None:
            self._idle.add(max(self._empty_since_s, self._began_s), now_s)
            self._empty_since_s = None
        elif not depths.rolling and self._empty_since_s is None:
            self._empty_since_s = now_s

    def synced(self, report: WeightSyncReport, now_s: float) -> dict[str, float | int | None]:
        """Return COLUMNS of the window that ends with this weight sync, and begin the next one."""
        seconds = now_s - self._began_s
        self._learner.add(self._done_s, self._done_s + report.learner_held_s)
        paused_from_s = max(report.paused_from_s, self._began_s)
        self._idle.add(paused_from_s, max(paused_from_s, report.resumed_s))
        if self._empty_since_s is not None:
            self._idle.add(max(self._empty_since_s, self._began_s), now_s)
        self.stale_samples += self._stale
        self.stale_prompts += self._stale_prompts
        values = (
            self._updates,
            self._stale,
            self._stale_prompts,
            self._partial,
            self._partial / self._samples if self._samples else None,
            self._span_max,
            _share(seconds - self._learner.seconds, seconds),
            _share(self._idle.seconds, seconds),
        )
        self._begin(report.version, now_s)
        return dict(zip(COLUMNS, values, strict=True))

    def _begin(self, version: int, now_s: float) -> None:
        self._version, self._began_s, self._done_s = version, now_s, now_s
        self._learner, self._idle = BusyTime(), BusyTime()
        self._updates = self._samples = self._stale = self._stale_prompts = 0
        self._partial = self._span_max = 0


def _share(part: float, whole: float) -> float | None:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None
