"""Gathers what the page's script draws, as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_opd.metrics.catalogue import metric_of
from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.report.accuracy import PASS, Track, tracks_of
from megatron_opd.report.charts import NO_CURVES, OTHERS, described, sections_of
from megatron_opd.report.lanes import BINS, MOST_INTERVALS, ReportLane, ReportTimeline, shares
from megatron_opd.report.markup import visible
from megatron_opd.report.run_data import RunData
from megatron_opd.report.series import points_of

LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""A bin of a lane is one character, the share of it that was busy in 63ds."""
MAIN, EVALUATED = "main", "evaluated: "
"""Names of tables: of the rows of metrics.jsonl, and of an evaluated set."""
AXES = ("update", "time")
ERROR = "stderr_pct"
"""Column that holds the error bars of accuracy_pct."""
TITLES = {
    "accuracy_pct": "Accuracy",
    "mean_response_tokens": "Length of the answers",
    "truncated_pct": "Answers cut at a limit",
    "mean_reward": "Reward of the answers",
    "mean_turns": "Turns of the answers",
    "mean_tool_calls": "Tool calls in the answers",
    "mean_call_errors": "Wrong tool calls in the answers",
    "lag_steps": "Updates made meanwhile",
}


def page_data(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return runs, charts and time lines.

    runs[i].tables: by name, columns of points; `update` and `time` are the x axes. sections:
    charts, each of curves (table, column, label). Every text is fit to be shown.
    """
    tracks = [tracks_of(run) for run in runs]
    columns = [column for run in runs for column in run.table.columns]
    sections = [
        {
            "title": title,
            "folded": title == OTHERS,
            "charts": [_chart(described(chart)) for chart in charts],
        }
        for title, charts in sections_of(columns)
    ]
    evaluation = _evaluation_charts(tracks)
    if evaluation:
        sections.insert(0, {"title": "Evaluation", "folded": False, "charts": evaluation})
    return {
        "runs": [
            {"name": visible(run.name), "tables": _tables(run, found)}
            for run, found in zip(runs, tracks, strict=True)
        ],
        "sections": sections,
        "timelines": [None if run.timeline is None else _timeline(run.timeline) for run in runs],
    }


def _tables(run: RunData, tracks: Mapping[str, Track]) -> dict[str, Any]:
    points = points_of(run.table)
    main = {name: list(column) for name, column in points.columns.items() if name not in NO_CURVES}
    main |= {"update": list(points.update_P), "time": list(points.time_s_P)}
    named = {MAIN: main} | {EVALUATED + name: track for name, track in tracks.items()}
    return {
        visible(table): {visible(name): column for name, column in columns.items()}
        for table, columns in named.items()
    }


def _chart(found: dict[str, Any]) -> dict[str, Any]:
    names = [visible(name) for name in found.pop("columns")]
    curves = [{"table": MAIN, "column": name, "label": name} for name in names]
    return {**found, "title": visible(found["title"]), "curves": curves}


def _evaluation_charts(tracks: Iterable[Mapping[str, Track]]) -> list[dict[str, Any]]:
    """Return a chart for every figure that some set has, with a curve for each set."""
    sets: dict[str, dict[str, None]] = {}  # by column; dicts keep the order
    for found in tracks:
        for name, track in found.items():
            for column in track:
                sets.setdefault(column, {})[name] = None
    charts: list[dict[str, Any]] = []
    for column, names in sets.items():
        if column in (*AXES, ERROR):
            continue
        metric = metric_of(column.partition(" ")[0])
        title = TITLES.get(column, column.replace(PASS, "pass@k, k ="))
        charts.append(
            {
                "title": visible(title),
                "unit": "" if metric is None else metric.unit,
                "text": "" if metric is None else metric.text,
                "healthy": None,
                "bars": ERROR if column == "accuracy_pct" else None,
                "curves": [
                    {"table": EVALUATED + name, "column": visible(column), "label": name}
                    for name in map(visible, names)
                ],
            }
        )
    return charts


def _timeline(timeline: ReportTimeline) -> dict[str, Any]:
    exact = sum(lane.num_intervals for lane in timeline.lanes) <= MOST_INTERVALS
    edges_s = np.linspace(0.0, timeline.stop_s, BINS + 1)
    return {
        "stop": round(timeline.stop_s, 3),
        "lanes": [_lane(lane, edges_s, exact=exact) for lane in timeline.lanes],
        "drops": [round(at_s, 3) for at_s in timeline.drops_s],
    }


def _lane(lane: ReportLane, edges_s: Any, *, exact: bool) -> dict[str, Any]:
    busy = [pair[0] for pair in lane.members]
    paused = [pair[1] for pair in lane.members]
    write = _intervals if exact and len(lane.members) == 1 else lambda each: _bins(each, edges_s)
    return {
        "name": visible(lane.name),
        "stage": lane.stage,
        "busy": write(busy),
        "paused": write(paused) if any(each.intervals for each in paused) else None,
    }


def _intervals(members: Sequence[BusyTime]) -> list[float]:
    """Return start, stop, start, stop, ... in seconds."""
    return [round(at_s, 4) for pair in members[0].intervals for at_s in pair]


def _bins(members: Sequence[BusyTime], edges_s: Any) -> str:
    levels = np.rint(shares(members, edges_s) * (len(LEVELS) - 1)).astype(int)
    return "".join(LEVELS[level] for level in levels)
