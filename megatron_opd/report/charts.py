"""Says which curves the report draws, in which order, and under which titles.

A chart whose columns no run has is left out. What no chart names is drawn at the end, a chart for
each column, so that a column of a user's own is seen too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_opd.metrics.catalogue import metric_of
from megatron_opd.metrics.metric import Range
from megatron_opd.records.branches import BRANCHES


@dataclass(frozen=True, slots=True)
class Chart:
    """Describes one chart. columns: curves of one unit. text: what it shows, in a sentence."""

    title: str
    columns: tuple[str, ...]
    text: str = ""


LEARNING = (
    Chart("Loss", ("loss",)),
    Chart(
        "Divergence from the teacher",
        ("reverse_kl_nats", "forward_kl_nats"),
        "Estimates of KL(student || teacher), which falls while the student learns, and of "
        "KL(teacher || student).",
    ),
    Chart("Reward", ("reward_mean",)),
    Chart("Entropy of the student", ("entropy_nats",)),
    Chart("Gradient norm", ("grad_norm",)),
    Chart("Learning rate", ("lr",)),
)
RESPONSES = (
    Chart("Response length", ("response_tokens_mean",)),
    Chart("Responses cut at the limit", ("length_stops",)),
    Chart(
        "Groups without reward spread",
        ("reward_uniform_group_fraction",),
    ),
    Chart("Dropped samples", ("dropped_samples",)),
)
FRESHNESS = (
    Chart(
        "Staleness",
        ("staleness_mean_versions", "staleness_max_versions"),
        "Age of the tokens trained on: mean and largest, in versions.",
    ),
    Chart("Responses of several versions", ("partial_rollouts",)),
    Chart(
        "Mismatch of sampler and learner",
        ("probs_diff_mean", "probs_diff_max"),
        "|p_learner - p_sampler| of tokens that the batch's own version sampled.",
    ),
    Chart("Importance ratio", ("ratio_p50", "ratio_p99")),
    Chart("Largest importance ratio", ("ratio_max",)),
    Chart("Effective sample size", ("effective_sample_fraction",)),
    Chart(
        "Actions cut by correction and trust region",
        ("truncated_fraction", "stopped_fraction"),
        "Weight share of actions whose ratio the correction changed, and whose gradient the trust "
        "region stopped.",
    ),
    Chart("Divergence of sampler and student", ("sampler_k3_nats",)),
    Chart("Routing that moved", ("routing_moved_fraction",)),
)
SPEED = (
    Chart("Throughput", ("tokens_per_s",)),
    Chart(
        "Idle, window by window",
        ("window_learner_idle_ratio", "window_sampler_idle_ratio"),
        "Share of the time between two weight syncs in which the learner, and the fleet, waited.",
    ),
    Chart(
        "Time of an update",
        ("train_s", "forward_backward_s", "optimizer_s"),
        "The whole update, its forward and backward passes, and the optimizer.",
    ),
    Chart(
        "Time of a weight sync",
        ("publish_s", "pause_s", "learner_held_s"),
        "The whole weight sync, the pause of the servers, and how long the learner was held.",
    ),
    Chart(
        "Samples in the pipeline",
        ("rolling_samples", "scoring_samples", "buffered_samples", "permits_in_use"),
        "Samples at the servers, at the teacher and before the learner, and permits in use.",
    ),
    Chart("Model FLOP/s of a rank", ("tflops_per_rank",)),
    Chart("Model FLOP utilisation", ("mfu",)),
    Chart("Memory of the learner", ("peak_rss_bytes",)),
)
CACHE = (
    Chart("Distinct ids a token", ("distinct_ids_per_token",)),
    Chart("Cache size", ("cache_bytes_per_token",)),
)
TEACHER = (
    Chart(
        "Teacher's scores",
        ("teacher_score_mean_nats", "teacher_score_std_nats"),
        "Mean and standard deviation of the log-probs that the teacher gives the sampled tokens.",
    ),
    Chart("Scores near uniform", ("teacher_near_uniform_fraction",)),
    Chart(
        "Aligned with the teacher's tokens",
        ("aligned_token_fraction", "aligned_mass_fraction"),
        "Share of the sampled tokens, and of the student's probability, that a teacher of another "
        "tokenizer has scored.",
    ),
    Chart(
        "Overlap with the teacher",
        ("health_topk_overlap", "health_teacher_mass"),
        "Share of the teacher's likeliest ids that are among the student's, and the probability "
        "that the teacher gives to the student's likeliest ids.",
    ),
    Chart(
        "Entropy of student and teacher",
        ("health_student_entropy_nats", "health_teacher_entropy_nats"),
        "At the student's own answers.",
    ),
    Chart("Advantage on the overlap", ("health_overlap_advantage",)),
    Chart("Tokens that carry 80 % of the loss", ("health_loss_tokens_80",)),
    Chart("Divergence at the end of answers", ("health_eos_kl_nats",)),
    Chart(
        "Hint's share of what hints change",
        ("leak_hint_share",),
        "1: the hint of another row teaches nothing of it. 0: it teaches the same, such as style.",
    ),
    Chart(
        "What hints change",
        ("leak_right_nats", "leak_wrong_nats"),
        "KL of the teacher without a hint from the teacher with the row's, and with another row's.",
    ),
)
TURNS = (
    Chart("Turns of a trajectory", ("turns_mean",)),
    Chart(
        "Time of a trajectory",
        ("turn_sampling_s_mean", "turn_waiting_s_mean", "environment_s_mean"),
        "Its turns' sampling, the wait for a slot within it, and the environment's answers.",
    ),
    Chart("Tool calls", ("tool_calls_mean",)),
    Chart("Tool calls that could not be made", ("tool_call_error_fraction",)),
    Chart("Given tokens", ("given_tokens_mean",)),
    Chart("Prefixes that were cached", ("turn_cached_fraction",)),
    Chart("Sequences of a trajectory", ("sequences_mean",)),
    Chart(
        "What began further sequences",
        tuple(f"branches_{cause}_mean" for cause in BRANCHES),
        "A history of its own, an edited one, one that was answered before, a rewritten one.",
    ),
    Chart("Settings of agents that were ignored", ("settings_ignored_mean",)),
    Chart(
        "Turns with a reward",
        ("turn_rewarded_fraction", "turn_alone_fraction"),
        "And of those with one the share that has no other at its position to be compared with.",
    ),
)
SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    ("Learning", LEARNING),
    ("Responses", RESPONSES),
    ("Turns and tools", TURNS),
    ("Freshness of the data", FRESHNESS),
    ("Speed", SPEED),
    ("Draw cache", CACHE),
    ("Teacher and student", TEACHER),
)
NO_CURVES = {"update", "version", "time_s", "unix_time_s", "first_uid", "last_uid"}
"""Columns that only count on."""
OTHERS = "Other columns"


def sections_of(columns: Iterable[str]) -> list[tuple[str, list[Chart]]]:
    """Return the charts of what runs have, by section."""
    present = [column for column in dict.fromkeys(columns) if column not in NO_CURVES]
    sections: list[tuple[str, list[Chart]]] = []
    for title, charts in SECTIONS:
        kept = [chart for each in charts if (chart := _of_present(each, present)) is not None]
        sections.append((title, kept))
    named = {column for _, charts in SECTIONS for chart in charts for column in chart.columns}
    others = [Chart(column, (column,)) for column in sorted(present) if column not in named]
    sections.append((OTHERS, others))
    return [(title, charts) for title, charts in sections if charts]


def _of_present(chart: Chart, present: Sequence[str]) -> Chart | None:
    columns = tuple(column for column in chart.columns if column in present)
    return Chart(chart.title, columns, chart.text) if columns else None


def described(chart: Chart) -> dict[str, Any]:
    """Return what the page needs of a chart, as JSON. healthy: [low, high], null: no bound."""
    metrics = [metric_of(column) for column in chart.columns]
    first = metrics[0]
    texts = [metric.text for metric in metrics if metric is not None]
    healthy: Range | None = first.healthy if first is not None and len(metrics) == 1 else None
    return {
        "title": chart.title,
        "columns": list(chart.columns),
        "unit": "" if first is None else first.unit,
        "text": chart.text or (texts[0] if texts else ""),
        "healthy": None if healthy is None else [healthy.low, healthy.high],
    }
