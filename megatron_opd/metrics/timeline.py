"""Draws a run on a trace: a row per engine and stage, with pauses and weight syncs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from megatron_opd.metrics.observers import RunObserver
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.metrics.turns import turn_lengths
from megatron_opd.metrics.types import Accounting, Depths, UpdateFigures, WeightSyncReport
from megatron_opd.records.types import AnyRollout, AnySample, Batch
from sglang_bridge.work import ServerWork

PIPELINE, TEACHER, LEARNER, SYNC = "pipeline", "teacher scoring", "learner", "weight sync"
EVALUATION = "evaluation"
WORK, CPU, CORES, CONTROLLER = "work", "CPU seconds", "cores", "controller"
# a counter event for every change would be most of the trace
COUNTER_INTERVAL_S = 0.05
OF_AN_EVALUATION = (
    *("set", "update", "version_min", "version_max", "lag_steps"),
    *("problems", "samples", "accuracy_pct", "mean_response_tokens"),
)
"""Columns of evaluations.jsonl that its span carries."""


class Timeline(RunObserver):
    """Draws the events of the pipeline on a trace.

    Args:
        trace: where to draw.
        engines: names of the student engines, a row each; others get one once they sample, and
            evaluations once there is one.
        clock: the event loop's clock (seconds).
    """

    def __init__(
        self,
        trace: TraceWriter,
        engines: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trace, self._clock = trace, clock
        self._ended = False
        self._engines = tuple(engines)
        self._last_counter_s = float("-inf")
        # rows are shown in this order
        for row in (PIPELINE, *map(engine_row, self._engines), TEACHER, LEARNER, SYNC):
            trace.row(row)

    def rolled_out(self, rollout: AnyRollout) -> None:
        """Draw a span named after the versions that sampled the response."""
        first, last = rollout.spans[0].version, rollout.spans[-1].version
        name = f"rollout v{first}" if first == last else f"rollout v{first}-v{last}"
        details: dict[str, Any] = {
            "uid": rollout.prompt.uid,
            "prompt_tokens": len(rollout.prompt.token_ids_P),
            "response_tokens": rollout.num_response_tokens,
            "ids": rollout.num_ids,
            "finish": rollout.finish_reason,
        }
        if turns := turn_lengths(rollout):
            details["turns"] = turns
        row = engine_row(rollout.engine)
        self._trace.span(row, name, rollout.started_s, rollout.finished_s, details)

    def scored(self, sample: AnySample, started_s: float, finished_s: float) -> None:
        """Draw a span for a scored sample."""
        details = {"uid": sample.rollout.prompt.uid, "ids": sample.rollout.num_ids}
        self._trace.span(TEACHER, "score", started_s, finished_s, details)

    def trained(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """Draw a span for a learner update."""
        details = {
            "samples": len(batch.samples),
            "response_tokens": batch.num_response_tokens,
            "version": batch.version,
            "loss": figures.loss,
            "reverse_kl_nats": figures.reverse_kl_nats,
            "cpu_s": figures.cpu_s,
        }
        self._trace.span(LEARNER, f"update {batch.update}", started_s, finished_s, details)

    def updated(self, batch: Batch, depths: Depths) -> None:
        """Hand what was drawn to the operating system: who watches the run sees it at once."""
        self._trace.flush()

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """Draw the weight sync with its phases inside, and the pause on every engine's row."""
        name = f"weight sync v{report.version}"
        details = {"bytes": report.num_bytes, "paused_s": round(report.paused_s, 6)}
        self._trace.span(SYNC, name, report.started_s, report.finished_s, details, lane=1)
        for phase in report.phases:
            self._trace.span(SYNC, phase.name, phase.started_s, phase.finished_s, lane=1)
        begin_s, end_s = report.paused_from_s, report.resumed_s
        for engine in report.servers or self._engines:
            self._trace.span(engine_row(engine), "paused", begin_s, end_s, details, lane=0)
        self._trace.flush()

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Draw a span for an evaluated set that ends now. row: its columns of evaluations.jsonl."""
        if not row["update"]:
            return  # what was before the run began before it
        now_s = self._clock()
        name = f"{row['set']} after {row['update']} updates"
        details = {key: row[key] for key in OF_AN_EVALUATION}
        self._trace.span(EVALUATION, name, now_s - row["seconds"], now_s, details)
        self._trace.flush()

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """Mark where a sample was dropped."""
        details = {"uid": uid, "detail": detail}
        self._trace.instant(PIPELINE, f"drop: {reason}", self._clock(), details)

    def moved(self, depths: Depths) -> None:
        """Draw how full the pipeline is, at most every COUNTER_INTERVAL_S."""
        now_s = self._clock()
        if now_s - self._last_counter_s < COUNTER_INTERVAL_S:
            return
        self._last_counter_s = now_s
        stages = {
            "rolling": depths.rolling,
            "scoring": depths.scoring,
            "buffered": depths.buffered,
        }
        self._trace.counter(PIPELINE, "samples", now_s, stages)
        self._trace.counter(PIPELINE, "permits in use", now_s, {"permits": depths.permits_in_use})

    def worked(self, url: str, work: ServerWork, now_s: float, *, teaches: bool) -> None:
        """Note what a server has done since it started; not after the run."""
        if self._ended:
            return
        row = TEACHER if teaches else engine_row(url)
        self._trace.instant(row, WORK, now_s, {"server": url, **msgspec.to_builtins(work)})

    def used(self, cpu_s: Mapping[str, float], cores: int, now_s: float) -> None:
        """Draw the CPU seconds on this machine by part, and note its cores; not after the run."""
        if self._ended:
            return
        self._trace.counter(PIPELINE, CPU, now_s, {CORES: cores, **cpu_s})

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """Hand what was drawn to the operating system."""
        self._ended = True
        self._trace.flush()

    def close(self) -> None:
        """Complete the trace file."""
        self._trace.close()


def engine_row(engine: str) -> str:
    """Return the row of a student engine."""
    return f"student {engine}"
