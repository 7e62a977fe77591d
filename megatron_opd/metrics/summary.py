"""Makes summary.json: everything a reader would quote of a run, with units in the key names."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting
from megatron_opd.records.drops import ABORTED

PACKAGES = {"torch": "torch", "megatron_core": "megatron-core", "sglang": "sglang"}


def summarise(
    totals: RunTotals, accounting: Accounting, wall_s: float, bound: int
) -> dict[str, Any]:
    """Summarise one run. The accuracies are null until the command line fills them.

    wall_s: seconds that the reader waited. bound: on staleness, in versions. A figure that
    was never measured is null. probs_diff_max, ratio_p99 and ratio_max are the largest over
    the updates; probs_diff_mean is the mean over the tokens measured; reward_* are over all
    samples trained on (metrics/rewards.py). probs_diff_replayed_* and probs_diff_free_*: with
    routing replay and without, over the same mismatch_compared_tokens (metrics/routing.py).
    """
    times, staleness, cache = totals.times, totals.staleness, totals.cache
    routing = totals.routing
    return {
        "student_accuracy_before_pct": None,
        "student_accuracy_after_pct": None,
        "teacher_accuracy_pct": None,
        "interrupted": accounting.interrupted,
        "updates": accounting.updates,
        "version": accounting.version,
        "samples_admitted": accounting.admitted,
        "samples_consumed": accounting.consumed,
        "samples_dropped": dict(sorted(accounting.dropped.items())),
        "samples_in_flight": accounting.in_flight,
        "aborted_requests": accounting.dropped.get(ABORTED, 0),
        "rollouts_restarted": totals.restarts,
        "train_tokens_per_s": totals.throughput.tokens_per_s(),
        "train_tokens_per_s_with_warmup": totals.throughput.tokens_per_s(warmup_updates=0),
        "overlap": times.overlap(),
        "staleness_mean_versions": staleness.tokens.mean,
        "staleness_max_versions": staleness.tokens.max,
        "staleness_bound_versions": bound,
        "staleness_tokens_by_version": staleness.tokens.as_json(),
        "staleness_samples_by_version": staleness.samples.as_json(),
        "partial_rollouts": staleness.partial_rollouts,
        "stale_samples": totals.stale_samples,
        "learner_idle_ratio": times.learner_idle_ratio(),
        "fleet_idle_ratio": times.fleet_idle_ratio(),
        "probs_diff_max": totals.mismatch_max.value,
        "probs_diff_mean": totals.mismatch_mean.value,
        "mismatch_tokens": int(totals.mismatch_mean.weight),
        "routing_moved_fraction": routing.moved.value,
        "routing_compared_updates": routing.compared_updates,
        "mismatch_compared_tokens": int(routing.free_mean.weight),
        "probs_diff_replayed_max": routing.replayed_max.value,
        "probs_diff_replayed_mean": routing.replayed_mean.value,
        "probs_diff_free_max": routing.free_max.value,
        "probs_diff_free_mean": routing.free_mean.value,
        "ratio_p99": totals.ratio_p99.value,
        "ratio_max": totals.ratio_max.value,
        "reward_mean": totals.rewards.mean,
        "reward_group_std_mean": totals.rewards.group_std,
        "reward_uniform_group_fraction": totals.rewards.uniform_groups,
        "overlong_penalty_mean": totals.rewards.overlong_penalty,
        "masked_samples": totals.masked_samples,
        "samples_without_teacher": totals.samples_without_teacher,
        **totals.dropped_groups(),
        "updates_without_signal": totals.updates_without_signal,
        "distinct_ids_per_token": cache.distinct_ids_per_token,
        "cached_ids_per_token": cache.cached_ids_per_token,
        "cache_bytes_per_token": cache.bytes_per_token,
        "response_tokens_mean": totals.response_tokens.value,
        "length_stops": totals.length_stops,
        "stop_string_stops": totals.stop_string_stops,
        "rollout_s_mean": totals.rollout_s.value,
        "score_s_mean": totals.score_s.value,
        "train_s_mean": totals.train_s.value,
        "publish_s_mean": totals.publish_s.value,
        "pause_s_mean": totals.pause_s.value,
        "learner_held_s_mean": totals.learner_held_s.value,
        "memory_release_s_mean": totals.memory_release_s.value,
        "memory_resume_s_mean": totals.memory_resume_s.value,
        "publish_bytes_mean": totals.publish_bytes.value,
        "pipeline_s": times.wall_s,
        "wall_s": wall_s,
        "peak_rss_bytes": totals.memory.peak_bytes,
        "commit": commit(),
        "versions": versions(),
    }


def versions() -> Mapping[str, str | None]:
    """Return installed versions of the engines, without importing them; null when one is absent."""
    found: dict[str, str | None] = {}
    for key, package in PACKAGES.items():
        try:
            found[key] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[key] = None
    return found


def commit() -> str | None:
    """Return the checkout's commit, with "-dirty" when tracked files differ; None without one."""
    here = Path(__file__).resolve().parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
