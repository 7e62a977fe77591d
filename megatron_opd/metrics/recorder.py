"""Observes the controller: totals, one row per update, the time line, the live display.

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

from megatron_opd.metrics.cache_size import CacheSizes
from megatron_opd.metrics.rewards import RewardStats
from megatron_opd.metrics.rollouts import RolloutRecord
from megatron_opd.metrics.servers import SampledByServer
from megatron_opd.metrics.signal import SignalWatch
from megatron_opd.metrics.sinks import Sink
from megatron_opd.metrics.staleness import StalenessCounts
from megatron_opd.metrics.teacher_health import TeacherWatch
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting, Depths, UpdateFigures, WeightSyncReport
from megatron_opd.metrics.window import COLUMNS, SyncWindow
from megatron_opd.records.types import AnyRollout, AnySample, Batch, Prompt
from sglang_bridge.work import ServerWork

logger = logging.getLogger(__name__)

NOT_ALWAYS_MEASURED = ("probs_diff_max", "probs_diff_mean", "mismatch_k3_nats")
"""Columns of the learner whose null belongs to one update; in its others null holds for the run."""
OF_A_WEIGHT_SYNC = (
    *("publish_s", "pause_s", "learner_held_s", "publish_bytes", "publish_tries", "servers"),
    *COLUMNS,
)
"""Columns that are null for an update that no weight sync follows."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Describes the run at one moment for a live display.

    None: not known yet. eta_s: seconds left.
    """

    updates: int
    updates_total: int
    version: int
    loss: float | None
    reverse_kl_nats: float | None
    reward_mean: float | None
    tokens_per_s: float | None
    staleness_mean: float | None
    staleness_max: int | None
    depths: Depths
    dropped: int
    elapsed_s: float
    eta_s: float | None


class Display(Protocol):
    """Shows a run while it runs."""

    def start(self, snapshot: Callable[[], Snapshot]) -> None:
        """Begin; `snapshot` may be called at any time, from any thread."""
        ...

    def updated(self, snapshot: Snapshot) -> None:
        """Show an update whose weights are live."""
        ...

    def stop(self) -> None:
        """Stop, as the run has ended."""
        ...


class Probe(Protocol):
    """Measures batches beside the run (rollout/teacher_health.py)."""

    def start(self, batch: Batch) -> None:
        """Begin to measure a batch, if it is its turn."""
        ...

    def columns(self) -> Mapping[str, Any]:
        """Return the columns that have come since the last call."""
        ...

    def stop(self) -> None:
        """Give up what is under way."""
        ...


class RunRecorder:
    """Turns what a run reports into rows, totals and a time line.

    Args:
        updates_total: updates the run will make.
        totals: counted into; read them for the summary.
        sinks: take one row per update and per evaluated set; closed by `close`.
        timeline: drawn on and closed with the sinks, if given.
        display: started and stopped, if given.
        clock: the event loop's clock (seconds).
        elapsed_s: what earlier attempts of a resumed run took, up to where it continues.
        updates: updates that they made.
        teacher_watch: looks at the scores of every batch; None where no teacher is read.
        signal: tells the user when updates teach nothing, if given.
        more_columns: of a row that is written, if given.
        live: told the updates of each version, once it is live and its row written.
        probe: measures some batches, if given; its columns are in the row that is written next.
        rollouts: records samples token by token and is closed, if given.
    """

    def __init__(
        self,
        updates_total: int,
        totals: RunTotals,
        sinks: Sequence[Sink] = (),
        timeline: Timeline | None = None,
        display: Display | None = None,
        clock: Callable[[], float] = time.monotonic,
        elapsed_s: float = 0.0,
        updates: int = 0,
        teacher_watch: TeacherWatch | None = None,
        signal: SignalWatch | None = None,
        more_columns: Callable[[], Mapping[str, Any]] | None = None,
        live: Callable[[int], None] = lambda updates: None,
        probe: Probe | None = None,
        rollouts: RolloutRecord | None = None,
    ) -> None:
        self.totals = totals
        self._more_columns = more_columns
        self._sampled_rewards: list[float] = []
        self.accounting: Accounting | None = None
        self._elapsed_s = elapsed_s
        self.started_s = clock() - elapsed_s
        self._updates_total = updates_total
        self._signal, self._live, self._rollouts = signal, live, rollouts
        self._sinks, self._timeline, self._display = tuple(sinks), timeline, display
        self._clock = clock
        self._teacher_watch, self._probe = teacher_watch, probe
        self._depths = Depths(0, 0, 0, 0, 0)
        self._updates = self._version = updates
        self._done_s = clock()
        # of updates whose weights are not live yet: two where a weight sync released the learner
        self._rows: dict[int, dict[str, Any]] = {}
        self._sampled = SampledByServer()
        self.window = SyncWindow(totals.group_size, updates, self._done_s)
        self._shown: dict[str, Any] = {}

    def started(self, now_s: float, depths: Depths) -> None:
        """Start the run's clock."""
        self.started_s, self._done_s = now_s - self._elapsed_s, now_s
        self._depths = depths
        self.window = SyncWindow(self.totals.group_size, self._version, now_s)
        if self._display is not None:
            self._display.start(self.snapshot)

    def admitted(self, prompt: Prompt) -> None:
        """Keep the prompt for the record of rollouts; the controller counts admissions."""
        if self._rollouts is not None:
            self._rollouts.follow(prompt.uid, prompt)

    def rolled_out(self, rollout: AnyRollout) -> None:
        """Count and draw a rollout; the user is told of the first one that was sampled anew."""
        if rollout.restarts and not self.totals.restarts:
            logger.warning(
                "rollout %d was sampled anew: a weight sync aborted it, or its connection to a "
                "server was lost; more of this kind are only counted (rollouts_restarted)",
                rollout.prompt.uid,
            )
        self.totals.add_rollout(rollout)
        self._sampled.add(rollout)
        if self._rollouts is not None:
            self._rollouts.follow(rollout.prompt.uid, rollout)
        if self._timeline is not None:
            self._timeline.rollout(rollout)

    def scored(self, sample: AnySample, started_s: float, finished_s: float) -> None:
        """Count and draw a score."""
        self.totals.add_score(started_s, finished_s)
        if sample.reward is not None:
            self._sampled_rewards.append(sample.reward)
        if self._rollouts is not None:
            self._rollouts.follow(sample.rollout.prompt.uid, sample)
        if self._timeline is not None:
            self._timeline.score(sample, started_s, finished_s)

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """Count and mark a drop; the user is told of the first one for a reason."""
        self.totals.add_drop(reason)
        if self.totals.drops[reason] == 1:
            logger.warning(
                "sample %d dropped for %s (%s); more of this kind are only counted",
                *(uid, reason, detail),
            )
        if self._rollouts is not None:
            self._rollouts.dropped(uid, reason, detail, self._updates)
        if self._timeline is not None:
            self._timeline.drop(uid, reason, detail, self._clock())

    def trained(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """Count and draw an update; its row waits for the weight sync."""
        self.totals.add_update(batch, figures, started_s, finished_s)
        self.window.trained(batch, started_s, finished_s)
        if self._rollouts is not None:
            self._rollouts.trained(batch)
        if self._timeline is not None:
            self._timeline.update(batch, figures, started_s, finished_s)
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
            **batch_columns(batch, self.totals.group_size),
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
        """Count and draw a weight sync; write the update's row."""
        self.totals.add_weight_sync(report)
        self._version = report.version
        if self._timeline is not None:
            self._timeline.weight_sync(report)
        columns = {
            "publish_s": report.seconds,
            "pause_s": report.paused_s,
            "learner_held_s": report.learner_held_s,
            "publish_bytes": report.num_bytes,
            "publish_tries": report.tries,
            "servers": self._sampled.columns(report),
            **self.window.synced(report, self._clock()),
        }
        if report.release_s is not None:
            columns |= {"memory_release_s": report.release_s, "memory_resume_s": report.resume_s}
        self.totals.stale_samples = self.window.stale_samples
        self._finish_row(batch, depths, columns)
        self._live(report.version)

    def _finish_row(self, batch: Batch, depths: Depths, columns: Mapping[str, Any]) -> None:
        self._depths, self._updates = depths, batch.update + 1
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
        if self._probe is not None:
            self._rows[batch.update] |= self._probe.columns()
            self._probe.start(batch)
        self._write_row(batch.update)
        if self._timeline is not None:
            self._timeline.flush()
        if self._display is not None:
            self._display.updated(self.snapshot())

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Write the row of an evaluated set, also before and after the updates, and draw it."""
        if self._timeline is not None and row["update"]:  # what was before the run began before it
            now_s = self._clock()
            self._timeline.evaluation(row, now_s - row["seconds"], now_s)
            self._timeline.flush()
        for sink in self._sinks:
            sink.evaluated(row)

    def moved(self, depths: Depths) -> None:
        """Keep the pipeline's depths for the display and draw them."""
        self._depths = depths
        self.window.moved(depths, self._clock())
        if self._timeline is not None:
            self._timeline.depths(depths, self._clock())

    def worked(self, url: str, work: ServerWork, now_s: float, *, teaches: bool) -> None:
        """Note on the time line what a server has done since it started; not after the run."""
        if self._timeline is not None and self.accounting is None:
            self._timeline.worked(url, work, now_s, teaches=teaches)

    def used(self, cpu_s: Mapping[str, float], cores: int, now_s: float) -> None:
        """Draw the CPU seconds of each part on this machine, by its name; not after the run."""
        if self._timeline is not None and self.accounting is None:
            self._timeline.used(cpu_s, cores, now_s)

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """Keep the accounting, write the unfinished rows of an interruption, end what is shown."""
        self.accounting = accounting
        if self._probe is not None:
            self._probe.stop()
        with ExitStack() as closing:  # each of them, whatever another one raises
            if self._rollouts is not None:
                closing.callback(self._rollouts.close)
            if self._timeline is not None:
                closing.callback(self._timeline.flush)
            if self._display is not None:
                closing.callback(self._display.stop)
            for update in sorted(self._rows):
                self._write_row(update)

    def close(self) -> None:
        """Close the time line and the sinks, once nothing is evaluated; safe to call twice."""
        with ExitStack() as closing:
            if self._timeline is not None:
                closing.callback(self._timeline.close)
            for sink in self._sinks:
                closing.callback(sink.close)

    def snapshot(self) -> Snapshot:
        """Return the state of the run now."""
        elapsed_s = self._clock() - self.started_s
        left = self._updates_total - self._updates
        return Snapshot(
            updates=self._updates,
            updates_total=self._updates_total,
            version=self._version,
            loss=self._shown.get("loss"),
            reverse_kl_nats=self._shown.get("reverse_kl_nats"),
            reward_mean=self._shown.get("reward_mean"),
            tokens_per_s=self._shown.get("tokens_per_s"),
            staleness_mean=self._shown.get("staleness_mean_versions"),
            staleness_max=self._shown.get("staleness_max_versions"),
            depths=self._depths,
            dropped=self.totals.drops.total(),
            elapsed_s=elapsed_s,
            eta_s=elapsed_s / self._updates * left if self._updates else None,
        )

    def _write_row(self, update: int) -> None:
        self._shown = self._rows.pop(update)
        for sink in self._sinks:
            sink.write(update, self._shown)


def _exact_mean(values: Sequence[float]) -> float | None:
    """Return the mean, the same in whatever order the values came; None without any."""
    return math.fsum(values) / len(values) if values else None


def batch_columns(batch: Batch, group_size: int = 1) -> dict[str, float | int | None]:
    """Return the columns that follow from the batch alone. staleness_*: per token, in versions.

    first_uid, last_uid: of its samples. Batches are cut in order, so those of a run do not overlap:
    no sample is trained on twice. masked_samples: whose tokens carry no loss.
    samples_without_teacher: for which no teacher was asked.
    """
    staleness, cache, rewards = StalenessCounts(), CacheSizes(), RewardStats(group_size)
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
    }
