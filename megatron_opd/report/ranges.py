"""Finds the columns that left the range in which the catalogue of metrics expects a good run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_opd.metrics.catalogue import metric_of
from megatron_opd.report.series import Table

LAST = 0.25
"""Share of the updates, the last ones, that are looked at: a run may begin outside."""
MOSTLY = 0.5
"""Share of these that must be outside."""
HAVE_OWN_RULES = ("window_learner_idle_ratio", "window_sampler_idle_ratio", "without_signal")
"""Columns about which report/findings.py has rules of its own."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Names a column that is out of its range, and what the catalogue advises."""

    title: str
    action: str


def outside(table: Table) -> Iterator[Outside]:
    """Yield the columns that are mostly out of their range in the last part of a run."""
    last = table.update_R >= np.quantile(table.update_R, 1 - LAST) if len(table) else []
    for column, values in table.columns.items():
        metric = metric_of(column)
        if metric is None or metric.healthy is None or column in HAVE_OWN_RULES:
            continue
        found = values[last]
        found = found[np.isfinite(found)]
        wrong = [value for value in found if not metric.healthy.holds(float(value))]
        if len(found) and len(wrong) >= MOSTLY * len(found):
            unit = f" {metric.unit}" if metric.unit else ""
            title = f"{column} is {np.median(found):.3g}{unit}; a good run has {metric.healthy}"
            yield Outside(title, metric.action)
