"""Totals a whole run. It only counts: no file, no clock, no decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_opd.config.objective import Credit
from megatron_opd.metrics.cache_size import CacheSizes
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.metrics.rewards import RewardStats
from megatron_opd.metrics.routing import RoutingTotals
from megatron_opd.metrics.staleness import StalenessCounts
from megatron_opd.metrics.throughput import StageTimes, Throughput
from megatron_opd.metrics.turns import sampling_times
from megatron_opd.metrics.types import Max, Mean, UpdateFigures, WeightSyncReport
from megatron_opd.records.drops import GROUP_REASONS
from megatron_opd.records.types import AnyRollout, Batch


class RunTotals:
    """Holds everything that summary.json is made of.

    Args:
        engines: names of the student engines.
        group_size: rollouts of a prompt, G.
        credit: whose rewards are compared.
    """

    def __init__(
        self, engines: Sequence[str] = (), group_size: int = 1, credit: Credit = "trajectory"
    ) -> None:
        self.group_size = group_size
        self.credit: Credit = credit
        self.rewards = RewardStats(group_size, credit)
        self.throughput = Throughput()
        self.times = StageTimes(engines)
        self.staleness = StalenessCounts()
        self.cache = CacheSizes()
        self.memory = PeakMemory()
        self.publish_s, self.pause_s, self.publish_bytes = Mean(), Mean(), Mean()
        self.learner_held_s = Mean()
        self.memory_release_s, self.memory_resume_s = Mean(), Mean()
        """Empty unless learner and servers share memory in turn."""
        self.train_s, self.rollout_s, self.score_s = Mean(), Mean(), Mean()
        self.response_tokens = Mean()
        self.mismatch_max, self.mismatch_mean = Max(), Mean()
        self.routing = RoutingTotals()
        self.ratio_p99, self.ratio_max = Max(), Max()
        self.drops: Counter[str] = Counter()
        self.updates_without_signal = 0
        """Updates that could teach nothing (metrics/signal.py)."""
        self.stale_samples = 0
        """Trained on when a newer version than that of their oldest token was live."""
        self.masked_samples = self.samples_without_teacher = 0
        """Trained on without a loss of their own; trained on without a teacher's scores."""
        self.length_stops = 0
        """Rollouts that ended at the response limit."""
        self.stop_string_stops = 0
        """Rollouts that ended at a stop string."""
        self.restarts = 0
        """Rollouts sampled anew because their connection was lost, once for every time."""

    def add_rollout(self, rollout: AnyRollout) -> None:
        """Count a finished rollout."""
        for start_s, stop_s in sampling_times(rollout):
            self.times.add_rollout(rollout.engine, start_s, stop_s)
        self.rollout_s.add(rollout.finished_s - rollout.started_s)
        self.response_tokens.add(rollout.num_response_tokens)
        self.length_stops += rollout.finish_reason == "length"
        self.stop_string_stops += rollout.finish_reason == "stop_string"
        self.restarts += rollout.restarts

    def add_score(self, started_s: float, finished_s: float) -> None:
        """Count a scored sample and the time it took."""
        self.times.teacher.add(started_s, finished_s)
        self.score_s.add(finished_s - started_s)

    def add_drop(self, reason: str) -> None:
        """Count a dropped sample."""
        self.drops[reason] += 1

    def dropped_groups(self) -> dict[str, int]:
        """Return how many groups were dropped for their rewards, by column."""
        return {
            f"groups_{reason}": self.drops[reason] // self.group_size for reason in GROUP_REASONS
        }

    def add_update(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """Count an update of the learner on `batch`."""
        self.times.train.add(started_s, finished_s)
        self.train_s.add(finished_s - started_s)
        self.throughput.add(batch.num_response_tokens, finished_s)
        self.staleness.add(batch)
        self.cache.add(batch)
        self.rewards.add(batch)
        self.masked_samples += sum(sample.masked for sample in batch.samples)
        self.samples_without_teacher += sum(not sample.has_scores for sample in batch.samples)
        if figures.probs_diff_max is not None:
            self.mismatch_max.add(figures.probs_diff_max)
        if figures.probs_diff_mean is not None:
            self.mismatch_mean.add(figures.probs_diff_mean, figures.mismatch_tokens)
        self.routing.add(batch, figures)
        self.ratio_p99.add(figures.ratio_p99)
        self.ratio_max.add(figures.ratio_max)
        self.memory.sample()

    def add_weight_sync(self, report: WeightSyncReport) -> None:
        """Count a weight sync."""
        self.times.weight_sync.add(report.started_s, report.finished_s)
        self.times.paused.add(report.paused_from_s, report.resumed_s)
        self.publish_s.add(report.seconds)
        self.pause_s.add(report.paused_s)
        self.learner_held_s.add(report.learner_held_s)
        if report.release_s is not None:
            self.memory_release_s.add(report.release_s)
            self.memory_resume_s.add(report.resume_s)
        self.publish_bytes.add(report.num_bytes)
