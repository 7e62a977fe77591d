"""Observes the controller: totals, and one row per update.

It only counts and writes; it decides nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from megatron_opd.config.objective import Credit
from megatron_opd.metrics.alignment import alignment_columns
from megatron_opd.metrics.cache_size import CacheSizes
from megatron_opd.metrics.observers import RunObserver
from megatron_opd.metrics.rewards import RewardStats
from megatron_opd.metrics.servers import SampledByServer
from megatron_opd.metrics.signal import SignalWatch
from megatron_opd.metrics.sinks import Sink
from megatron_opd.metrics.staleness import StalenessCounts, teacher_staleness
from megatron_opd.metrics.teacher_health import TeacherWatch
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.turns import credit_columns, turn_columns
from megatron_opd.metrics.types import Accounting, Depths, UpdateFigures, WeightSyncReport
from megatron_opd.metrics.window import COLUMNS, SyncWindow
from megatron_opd.records.types import AnyRollout, AnySample, Batch

logger = logging.getLogger(__name__)

NOT_ALWAYS_MEASURED = ("probs_diff_max", "probs_diff_mean", "mismatch_k3_nats")
"""Columns of the learner whose null belongs to one update; in its others null holds for the run."""
OF_A_WEIGHT_SYNC = (
    *("publish_s", "pause_s", "learner_held_s", "publish_bytes", "publish_tries", "servers"),
    *COLUMNS,
)
"""Columns that are null for an update that no weight sync follows."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """Describes what earlier processes of a resumed run made, up to where it continues."""

    updates: int = 0
    elapsed_s: float = 0.0


class Probe(Protocol):
    """Measures batches beside the run (rollout/beside.py)."""

    def start(self, batch: Batch) -> None:
        """Begin to measure a batch, if it is its turn."""
        ...

    def columns(self) -> Mapping[str, Any]:
        """Return the columns that have come since the last call."""
        ...

    def stop(self) -> None:
        """Give up what is under way."""
        ...


class RunRecorder(RunObserver):
    """Turns what a run reports into rows and totals.

    Args:
        totals: counted into; read them for the summary.
        sinks: take one row per update and per evaluated set; closed by `close`.
        clock: the event loop's clock (seconds).
        earlier: where a resumed run continues.
        teacher_watch: looks at the scores of every batch; None where no teacher is read.
        signal: tells the user when updates teach nothing, if given.
        more_columns: of a row that is written, if given.
        probes: measure some batches; their columns are in the row that is written next.
    """

    def __init__(
        self,
        totals: RunTotals,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.monotonic,
        earlier: Earlier = Earlier(),
        teacher_watch: TeacherWatch | None = None,
        signal: SignalWatch | None = None,
        more_columns: Callable[[], Mapping[str, Any]] | None = None,
        probes: Sequence[Probe] = (),
    ) -> None:
        self.totals = totals
        self._more_columns = more_columns
        self._sampled_rewards: list[float] = []
        self.accounting: Accounting | None = None
        self._earlier = earlier
        self.started_s = clock() - earlier.elapsed_s
        self._signal, self._sinks, self._clock = signal, tuple(sinks), clock
        self._teacher_watch, self._probes = teacher_watch, tuple(probes)
        self.depths = Depths(0, 0, 0, 0, 0)
        self.updates = self.version = earlier.updates
        """Updates whose rows are written, and the version that is live."""
        self._done_s = clock()
        # of updates whose weights are not live yet: two where a weight sync released the learner
        self._rows: dict[int, dict[str, Any]] = {}
        self._sampled = SampledByServer()
        self.window = SyncWindow(totals.group_size, earlier.updates, self._done_s)
        self.last_row: Mapping[str, Any] = {}
        """The row that was written last."""

    def elapsed_s(self) -> float:
        """Return the seconds since the run began, those of earlier processes included."""
        return self._clock() - self.started_s

    def started(self, now_s: float, depths: Depths) -> None:
        """Start the run's clock."""
        self.started_s, self._done_s = now_s - self._earlier.elapsed_s, now_s
        self.depths = depths
        self.window = SyncWindow(self.totals.group_size, self.version, now_s)

    def rolled_out(self, rollout: AnyRollout) -> None:
        """Count a rollout; the user is told of the first one that was sampled anew."""
        if rollout.restarts and not self.totals.restarts:
            logger.warning(
                "rollout %d was sampled anew: a weight sync aborted it, its connection to a server "
                "was lost, or one was too busy; more are only counted (rollouts_restarted)",
                rollout.prompt.uid,
            )
        self.totals.add_rollout(rollout)
        self._sampled.add(rollout)

    def scored(self, sample: AnySample, started_s: float, finished_s: float) -> None:
        """Count a score."""
        self.totals.add_score(started_s, finished_s)
        if sample.reward is not None:
            self._sampled_rewards.append(sample.reward)

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """Count a drop; the user is told of the first one for a reason."""
        self.totals.add_drop(reason)
        if self.totals.drops[reason] == 1:
            logger.warning(
                "sample %d dropped for %s (%s); more of this kind are only counted",
                uid,
                reason,
                detail,
            )

    def trained(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """Count an update; its row waits for the weight sync."""
        self.totals.add_update(batch, figures, started_s, finished_s)
        self.window.trained(batch, started_s, finished_s)
        since_last_s = finished_s - self._done_s
        self._done_s = finished_s
        reported = msgspec.to_builtins(figures)
        # a tagged record names its type besides its figures
        columns = {
            key: value
            for key, value in reported.items()
            if not isinstance(value, str) and (value is not None or key in NOT_ALWAYS_MEASURED)
        }
        row = self._rows[batch.update] = columns | {
            "update": batch.update,
            "version": batch.version,
            "time_s": finished_s - self.started_s,
            "unix_time_s": time.time(),
            "train_s": finished_s - started_s,
            "tokens_per_s": batch.num_response_tokens / since_last_s if since_last_s > 0 else None,
            **batch_columns(batch, self.totals.group_size, self.totals.credit),
        }
        if self._teacher_watch is not None:
            row |= self._teacher_watch.columns(batch)
        row["without_signal"] = int(self._lacks_signal(figures, row))
        if self._teacher_watch is not None:
            self._teacher_watch.look(batch)  # may stop the run; the row is written all the same

    def _lacks_signal(self, figures: UpdateFigures, row: Mapping[str, Any]) -> bool:
        """Return whether the update taught nothing; print a line when that begins or ends."""
        if self._signal is None:
            return False
        why, line = self._signal.add(figures, row["reward_uniform_group_fraction"])
        if line is not None:
            logger.warning("%s", line)
        self.totals.updates_without_signal += why is not None
        return why is not None

    def updated(self, batch: Batch, depths: Depths) -> None:
        """Write the row of an update that no weight sync follows."""
        self._finish_row(batch, depths, dict.fromkeys(OF_A_WEIGHT_SYNC))

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """Count a weight sync; write the update's row."""
        self.totals.add_weight_sync(report)
        self.version = report.version
        columns = {
            "publish_s": report.seconds,
            "pause_s": report.paused_s,
            "learner_held_s": report.learner_held_s,
            "publish_bytes": report.num_bytes,
            "publish_tries": report.tries,
            "servers": self._sampled.columns(report),
            **self.window.synced(report, self._clock()),
        }
        if report.teachers:
            columns["teacher_publish_s"] = sum(each.seconds for each in report.teachers)
        if report.release_s is not None:
            columns |= {"memory_release_s": report.release_s, "memory_resume_s": report.resume_s}
        self.totals.stale_samples = self.window.stale_samples
        self._finish_row(batch, depths, columns)

    def _finish_row(self, batch: Batch, depths: Depths, columns: Mapping[str, Any]) -> None:
        self.depths, self.updates = depths, batch.update + 1
        self._rows[batch.update] |= {
            "rolling_samples": depths.rolling,
            "scoring_samples": depths.scoring,
            "buffered_samples": depths.buffered,
            "permits_in_use": depths.permits_in_use,
            "dropped_samples": self.totals.drops.total(),
            **self.totals.dropped_groups(),
            "reward_sampled_mean": _exact_mean(self._sampled_rewards),
            **({} if self._more_columns is None else self._more_columns()),
            **columns,
        }
        self._sampled_rewards = []
        for probe in self._probes:
            self._rows[batch.update] |= probe.columns()
            probe.start(batch)
        self._write_row(batch.update)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Write the row of an evaluated set, also before and after the updates."""
        for sink in self._sinks:
            sink.evaluated(row)

    def moved(self, depths: Depths) -> None:
        """Keep the pipeline's depths."""
        self.depths = depths
        self.window.moved(depths, self._clock())

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """Keep the accounting and write the unfinished rows of an interruption."""
        self.accounting = accounting
        for probe in self._probes:
            probe.stop()
        for update in sorted(self._rows):
            self._write_row(update)

    def close(self) -> None:
        """Close the sinks, once nothing is evaluated; safe to call twice."""
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)

    def _write_row(self, update: int) -> None:
        self.last_row = row = self._rows.pop(update)
        for sink in self._sinks:
            sink.write(update, row)


def _exact_mean(values: Sequence[float]) -> float | None:
    """Return the mean, the same in whatever order the values came; None without any."""
    return math.fsum(values) / len(values) if values else None


def batch_columns(
    batch: Batch, group_size: int = 1, credit: Credit = "trajectory"
) -> dict[str, float | int | None]:
    """Return the columns that follow from the batch alone. staleness_*: per token, in versions.

    first_uid, last_uid: of its samples. Batches are cut in order, so those of a run do not overlap:
    no sample is trained on twice. masked_samples: whose tokens carry no loss.
    samples_without_teacher: for which no teacher was asked. teacher_staleness_*: of teachers that
    follow the student, over samples. aligned_*: of a teacher of another tokenizer.
    """
    staleness, cache, rewards = StalenessCounts(), CacheSizes(), RewardStats(group_size, credit)
    staleness.add(batch)
    cache.add(batch)
    rewards.add(batch)
    rollouts = [sample.rollout for sample in batch.samples]
    return {
        "num_samples": len(rollouts),
        "first_uid": min(rollout.prompt.uid for rollout in rollouts),
        "last_uid": max(rollout.prompt.uid for rollout in rollouts),
        "num_response_tokens": batch.num_response_tokens,
        "staleness_mean_versions": staleness.tokens.mean,
        "staleness_max_versions": staleness.tokens.max,
        "partial_rollouts": staleness.partial_rollouts,
        "response_tokens_mean": batch.num_response_tokens / len(rollouts),
        "length_stops": sum(rollout.finish_reason == "length" for rollout in rollouts),
        "stop_string_stops": sum(rollout.finish_reason == "stop_string" for rollout in rollouts),
        "reward_mean": rewards.mean,
        "reward_group_std_mean": rewards.group_std,
        "reward_uniform_group_fraction": rewards.uniform_groups,
        "overlong_penalty_mean": rewards.overlong_penalty,
        "masked_samples": sum(sample.masked for sample in batch.samples),
        "samples_without_teacher": sum(not sample.has_scores for sample in batch.samples),
        "distinct_ids_per_token": cache.distinct_ids_per_token,
        "cache_bytes_per_token": cache.bytes_per_token,
        **teacher_staleness(batch),
        **alignment_columns(batch.samples),
        **turn_columns(rollouts),
        **(credit_columns(batch.samples, group_size) if credit == "turn" else {}),
    }
