"""Means over seeds with 95% intervals (Student's t: three seeds are few)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast

from studies.grid.trials import CURVES, PIPELINE

# 0.975 quantiles of Student's t by degrees of freedom; 1.96 beyond
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
T_MANY = 1.96
WINDOW = 5  # updates that a reward or a point of a curve is averaged over


def interval(values: Sequence[float | None], noise: float = 0.0) -> dict[str, float | int | None]:
    """{mean, half_width_95, n} of the values that exist; null where there are too few.

    noise: what one value is uncertain by; seeds that agree by chance do not make less of it.
    """
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "half_width_95": None, "n": 0}
    half = None
    if len(known) > 1:
        freedom = len(known) - 1
        quantile = T_975[freedom - 1] if freedom <= len(T_975) else T_MANY
        half = max(quantile * statistics.stdev(known) / math.sqrt(len(known)), noise)
    return {"mean": statistics.fmean(known), "half_width_95": half, "n": len(known)}


def tells(figure: Mapping[str, Any]) -> int:
    """1 or -1 where the interval leaves 0 out, above or below; 0 where nothing can be told."""
    mean, half = figure["mean"], figure["half_width_95"]
    if mean is None or half is None or abs(mean) <= half:
        return 0
    return 1 if mean > 0 else -1


def intervals(part: Any) -> list[Mapping[str, Any]]:
    """All intervals of a part of a record, however deep."""
    if not isinstance(part, Mapping):
        return []
    if "half_width_95" in part:
        return [cast(Mapping[str, Any], part)]
    return [each for inner in cast(Mapping[str, Any], part).values() for each in intervals(inner)]


def comparisons(*parts: Any) -> dict[str, float]:
    """How many intervals of parts of a record leave 0 out, and would if there were nothing."""
    every = [each for part in parts for each in intervals(part)]
    found = [each for each in every if each["half_width_95"] is not None]
    return {
        "compared": len(found),
        "leave_0_out": sum(tells(each) != 0 for each in found),
        "expected_by_chance": 0.05 * len(found),
    }


def noise_pct(answers: int) -> float:
    """The largest standard error of an accuracy in percent over so many answers."""
    return 100 * math.sqrt(0.25 / answers)


def windowed(values: Sequence[float | None]) -> list[float]:
    """Means of every WINDOW consecutive values that exist."""
    known = [value for value in values if value is not None]
    width = min(WINDOW, len(known))
    return [
        statistics.fmean(known[first : first + width])
        for first in range(len(known) - width + 1)
        if width
    ]


def row_figures(row: dict[str, Any]) -> dict[str, float | None]:
    """The scalars of one run."""
    summary, curves = row["summary"], row["curves"]
    rewards = windowed(curves["reward_mean"])
    figures: dict[str, float | None] = {
        "accuracy_before_pct": summary["student_accuracy_before_pct"],
        "accuracy_after_pct": summary["student_accuracy_after_pct"],
        "accuracy_best_pct": summary.get("student_accuracy_best_pct"),
        "reward_last": rewards[-1] if rewards else None,
        "reward_best": max(rewards, default=None),
        "staleness_mean_versions": summary["staleness_mean_versions"],
        "staleness_max_versions": summary["staleness_max_versions"],
        "wall_s": summary["wall_s"],
    }
    figures |= {key: summary.get(key) for key in PIPELINE}
    for key in CURVES:
        known = [value for value in curves[key] if value is not None]
        figures[f"{key}_over_run"] = statistics.fmean(known) if known else None
        # a single token's ratio can make up the whole mean of a variance
        figures[f"{key}_median"] = statistics.median(known) if known else None
    figures["probs_diff_max_run_max"] = summary["probs_diff_max"]
    return figures


def aggregated(rows: Sequence[dict[str, Any]], noise: float = 0.0) -> list[dict[str, Any]]:
    """One entry per (setting, method), in order of appearance: figures and curves over seeds.

    noise: what an accuracy is uncertain by.
    """
    entries = []
    for setting, method in dict.fromkeys((row["setting"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
        figures = [row_figures(row) for row in mine]
        updates = max(len(row["curves"]["reward_mean"]) for row in mine)
        entries.append(
            {
                "setting": setting,
                "method": method,
                "seeds": [row["seed"] for row in mine],
                "diverged": sum(row["status"] == "diverged" for row in mine),
                "figures": {
                    key: interval(
                        [each[key] for each in figures],
                        noise if key.startswith("accuracy") else 0.0,
                    )
                    for key in figures[0]
                },
                "curves": {key: _curve(mine, key, updates) for key in CURVES},
            }
        )
    return entries


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Running mean over the last WINDOW values that exist; None where there is none."""
    means: list[float | None] = []
    for stop in range(1, len(values) + 1):
        known = [value for value in values[max(0, stop - WINDOW) : stop] if value is not None]
        means.append(statistics.fmean(known) if known else None)
    return means


def _curve(rows: Sequence[dict[str, Any]], key: str, updates: int) -> dict[str, list[Any]]:
    """Mean and half width by update, over the runs that got that far, each smoothed by itself."""
    curves = [smoothed(row["curves"][key]) for row in rows]
    points = [interval([curve[u] for curve in curves if u < len(curve)]) for u in range(updates)]
    return {
        part: [None if point[part] is None else float(f"{point[part]:.4g}") for point in points]
        for part in ("mean", "half_width_95")
    }
