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
OF_TURNS = ("mean_reward", "mean_turns", "mean_tool_calls", "mean_call_errors")
"""Columns of sets whose answers are trajectories: what they are worth need not be 0 or 1."""
PASS = "pass_at_k"

Track = dict[str, list[float | None]]
"""One evaluated set: its points by column; `update` and `time` are where they stand."""


def tracks_of(run: RunData) -> dict[str, Track]:
    """Return what was evaluated, by name of the set, in the order of the updates."""
    at_ends = _of_summary(run)
    rows = [*(run.evaluations or at_ends["student"]), *at_ends["teacher"]]
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda each: _known(each.get("update"))):
        by_set.setdefault(str(row.get("set", HELD_OUT)), []).append(row)
    return {name: _track(found) for name, found in by_set.items()}


def _track(rows: Sequence[Mapping[str, Any]]) -> Track:
    flat = [dict(row) | _passes(row.get(PASS)) for row in rows]
    played = any("mean_turns" in row for row in flat)
    names = [*COLUMNS, *dict.fromkeys(key for row in flat for key in row if key.startswith(PASS))]
    names += OF_TURNS if played else ()
    track = {name: [_value(row.get(name)) for row in flat] for name in names}
    track = {name: values for name, values in track.items() if any(v is not None for v in values)}
    return {
        "update": [_value(row.get("update")) for row in flat],
        "time": [_value(row.get("time_s")) for row in flat],
        **track,
    }


def _passes(found: Any) -> dict[str, Any]:
    """Return pass@k as columns `pass_at_k K`, without pass@1, which is the accuracy."""
    if not isinstance(found, dict):
        return {}
    return {f"{PASS} {k}": value for k, value in cast(dict[str, Any], found).items() if k != "1"}


def _of_summary(run: RunData) -> dict[str, list[dict[str, Any]]]:
    """Return what a summary holds: the student before and after, and teachers, who do not change.

    Each has two rows, at the begin and the end of the run; none where it was not evaluated. With
    several sets a teacher has two for each: `teacher on SET`.
    """
    reports = (run.summary or {}).get("evaluations")
    known = cast(dict[str, Any], reports) if isinstance(reports, dict) else {}
    last_s = float(max(run.table.values("time_s"), default=0.0))
    ends = ((0.0, 0.0), (float(len(run.table)), last_s))

    def rows(shown: str, first: str, last: str) -> list[dict[str, Any]]:
        return [
            {"update": update, "time_s": time_s, "set": shown, **report}
            for (update, time_s), name in zip(ends, (first, last), strict=True)
            if isinstance(report := known.get(name), dict)
        ]

    teachers = [name for name in known if name.partition(" ")[0] == "teacher"]
    return {
        "student": rows(HELD_OUT, "student before", "student after"),
        "teacher": [row for name in teachers for row in rows(name, name, name)],
    }


def _known(value: Any) -> float:
    found = number(value)
    return -1.0 if math.isnan(found) else found


def _value(value: Any) -> float | None:
    found = number(value)
    return None if math.isnan(found) else found
