"""Computes the headline figures of a run: from its summary, or from its rows while there is none.

What summary.json says is shown as it is. What is computed from rows has the same definition, or
another name: a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_opd.metrics.throughput import WARMUP_UPDATES
from megatron_opd.report.run_data import RunData
from megatron_opd.report.series import Table, number

OF_AN_END = 0.05
"""Share of the updates whose mean stands for the begin, or the end, of a run."""


def run_figures(run: RunData) -> dict[str, float]:
    """Return figures by the names of summary.json, without those that are not known."""
    found = figures_of_rows(run.table)
    if run.summary is not None:
        found |= _numbers(run.summary)
        dropped = run.summary.get("samples_dropped")
        if isinstance(dropped, dict):
            found["dropped_samples"] = sum(map(_count, dropped.values()))
    return {key: value for key, value in found.items() if math.isfinite(value)}


def figures_of_rows(table: Table) -> dict[str, float]:
    """Compute from rows what they tell of a run, under the names of summary.json."""
    tokens = "num_response_tokens"
    found = {
        "updates": float(len(table)),
        "samples_consumed": _sum(table, "num_samples"),
        "dropped_samples": _max(table, "dropped_samples"),
        "staleness_mean_versions": _mean(table, "staleness_mean_versions", tokens),
        "staleness_max_versions": _max(table, "staleness_max_versions"),
        "partial_rollouts": _sum(table, "partial_rollouts"),
        "probs_diff_max": _max(table, "probs_diff_max"),
        "probs_diff_mean": _mean(table, "probs_diff_mean", "mismatch_tokens"),
        "ratio_p99": _max(table, "ratio_p99"),
        "ratio_max": _max(table, "ratio_max"),
        "updates_without_signal": _sum(table, "without_signal"),
        "distinct_ids_per_token": _mean(table, "distinct_ids_per_token", tokens),
        "cache_bytes_per_token": _mean(table, "cache_bytes_per_token", tokens),
        "train_s_mean": _mean(table, "train_s"),
        "publish_s_mean": _mean(table, "publish_s"),
        "pause_s_mean": _mean(table, "pause_s"),
        "train_tokens_per_s": _tokens_per_s(table),
        "elapsed_s": _max(table, "time_s"),
        "window_learner_idle": _by_window(table, "window_learner_idle_ratio"),
        "window_sampler_idle": _by_window(table, "window_sampler_idle_ratio"),
        "trained_tokens_mean": _mean(table, "response_tokens_mean", "num_samples"),
        "trained_length_stops": _sum(table, "length_stops"),
    }
    for column in ("loss", "reverse_kl_nats", "reward_mean", "entropy_nats"):
        found[f"{column}_begin"], found[f"{column}_end"] = ends(table, column)
    return {key: value for key, value in found.items() if math.isfinite(value)}


def ends(table: Table, column: str) -> tuple[float, float]:
    """Return the mean of the first and of the last OF_AN_END of a column's numbers, NaN if none."""
    values = table.values(column)
    if not len(values):
        return math.nan, math.nan
    count = max(1, math.ceil(OF_AN_END * len(values)))
    return float(values[:count].mean()), float(values[-count:].mean())


def _numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary; an unknown figure is none, and does not hide a row's."""
    found = {key: number(value) for key, value in tree.items()}
    return {key: value for key, value in found.items() if math.isfinite(value)}


def _count(value: Any) -> float:
    found = number(value)
    return found if found > 0 else 0.0


def _sum(table: Table, column: str) -> float:
    return float(table.values(column).sum()) if table.has(column) else math.nan


def _max(table: Table, column: str) -> float:
    return float(table.values(column).max()) if table.has(column) else math.nan


def _mean(table: Table, column: str, weight: str | None = None) -> float:
    """Return the mean over the rows that have the column, weighted by another one if given."""
    if not table.has(column):
        return math.nan
    values = table.columns[column]
    weights = np.ones(len(table)) if weight is None else table.columns.get(weight)
    if weights is None:
        return math.nan
    known = np.isfinite(values) & np.isfinite(weights) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan


def _tokens_per_s(table: Table) -> float:
    """Return response tokens per second as metrics/throughput.py does: after the warm-up."""
    tokens = table.columns.get("num_response_tokens")
    if tokens is None or len(table) <= WARMUP_UPDATES:
        return math.nan
    seconds = table.time_s_R[-1] - table.time_s_R[WARMUP_UPDATES - 1]
    return float(tokens[WARMUP_UPDATES:].sum() / seconds) if seconds > 0 else math.nan


def _by_window(table: Table, column: str) -> float:
    """Return the mean of a ratio of windows, weighted by how long they were."""
    if not table.has(column):
        return math.nan
    known = np.isfinite(table.columns[column]) & np.isfinite(table.time_s_R)
    if not known.any():
        return math.nan
    seconds = np.diff(table.time_s_R[known], prepend=0.0)
    values = table.columns[column][known]
    return float(np.average(values, weights=seconds)) if seconds.sum() > 0 else math.nan
