"""Collects what was evaluated: the rows of evaluations.jsonl, or the ends that a summary holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from megatron_opd.report.run_data import RunData
from megatron_opd.report.series import number

HELD_OUT = "held-out"
"""Name of the set of runs that were evaluated before and after alone."""
COLUMNS = ("accuracy_pct", "stderr_pct", "mean_response_tokens", "truncated_pct", "lag_steps")
PASS = "pass_at_k"

Track = dict[str, list[float | None]]
"""One evaluated set: its points by column; `update` and `time` are where they stand."""


def tracks_of(run: RunData) -> dict[str, Track]:
    """Return what was evaluated, by name of the set, in the order of the updates."""
    rows = run.evaluations or _of_summary(run)
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda each: _known(each.get("update"))):
        by_set.setdefault(str(row.get("set", HELD_OUT)), []).append(row)
    return {name: _track(found) for name, found in by_set.items()}


def _track(rows: Sequence[Mapping[str, Any]]) -> Track:
    flat = [dict(row) | _passes(row.get(PASS)) for row in rows]
    names = [*COLUMNS, *dict.fromkeys(key for row in flat for key in row if key.startswith(PASS))]
    track = {name: [_value(row.get(name)) for row in flat] for name in names}
    track = {name: values for name, values in track.items() if any(v is not None for v in values)}
    return {
        "update": [_value(row.get("update")) for row in flat],
        "time": [_value(row.get("time_s")) for row in flat],
        **track,
    }


def _passes(found: Any) -> dict[str, Any]:
    """Return pass@k as columns `pass_at_k K`."""
    if not isinstance(found, dict):
        return {}
    return {f"{PASS} {k}": value for k, value in cast(dict[str, Any], found).items()}


def _of_summary(run: RunData) -> list[dict[str, Any]]:
    """Return two rows for a run that was evaluated at its begin and its end."""
    reports = (run.summary or {}).get("evaluations")
    if not isinstance(reports, dict):
        return []
    last, seconds = (float(len(run.table)), run.table.values("time_s"))
    ends = {"student before": (0.0, 0.0), "student after": (last, max(seconds, default=0.0))}
    return [
        {"update": update, "time_s": time_s, "set": HELD_OUT, **report}
        for name, (update, time_s) in ends.items()
        if isinstance(report := cast(dict[str, Any], reports).get(name), dict)
    ]


def _known(value: Any) -> float:
    found = number(value)
    return -1.0 if math.isnan(found) else found


def _value(value: Any) -> float | None:
    found = number(value)
    return None if math.isnan(found) else found
