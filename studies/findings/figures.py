"""What the rows say: accuracy by staleness, slopes, paired differences, tails of the ratio."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast

from studies.findings.rows import Row
from studies.findings.trial import NOISE_PCT
from studies.grid.statistics import comparisons, interval

BySeed = Mapping[int, Row]
Table = dict[str, dict[int, dict[int, Row]]]
"""Rows by estimator, staleness and seed."""

POWER_DIFFERENCE_PCT = 3.0
Z_TWO_SIDED, Z_POWER = 1.96, 0.84  # a test at 5 %, with a power of 80 %
PLATEAU = 16  # last updates over which a curve's level is averaged


def keyed(rows: Sequence[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """Rows by setting and method, and by seed."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        found.setdefault((row["setting"], row["method"]), {})[row["seed"]] = row
    return found


def table(rows: Sequence[Row]) -> Table:
    """Rows whose setting is a staleness alone."""
    found: Table = {}
    for (setting, method), runs in keyed(rows).items():
        if setting[1:].isdigit():
            found.setdefault(method, {})[int(setting[1:])] = runs
    return found


def accuracy(row: Row) -> float:
    """Accuracy after the run; a run whose loss stopped being finite has none, and counts as 0."""
    value = row["summary"]["student_accuracy_after_pct"]
    return 0.0 if value is None else float(value)


def slope(accuracy_by_k: Mapping[int, float]) -> float | None:
    """Points lost for each unit of log2(k + 1), by least squares (Table 1); null below 3 points."""
    if len(accuracy_by_k) < 3:
        return None
    x = [math.log2(k + 1) for k in accuracy_by_k]
    return statistics.linear_regression(x, list(accuracy_by_k.values())).slope


def slopes(by_k: Mapping[int, BySeed]) -> dict[str, Any]:
    """One slope a seed, over the stalenesses which all its seeds have, and their interval."""
    seeds = sorted({seed for rows in by_k.values() for seed in rows})
    per_seed = {
        seed: slope({k: accuracy(rows[seed]) for k, rows in sorted(by_k.items()) if seed in rows})
        for seed in seeds
    }
    shared = [k for k, rows in by_k.items() if len(rows) == len(seeds)]
    return {"by_seed": per_seed, **interval(list(per_seed.values()), slope_noise(shared))}


def slope_noise(stalenesses: Sequence[int]) -> float:
    """What a slope over these is uncertain by, when each accuracy is by NOISE_PCT."""
    x = [math.log2(k + 1) for k in stalenesses]
    if len(x) < 3:
        return 0.0
    return NOISE_PCT / math.sqrt(sum((each - statistics.fmean(x)) ** 2 for each in x))


def paired(one: BySeed, other: BySeed) -> dict[str, Any]:
    """Accuracy of one minus the other's, seed by seed, its interval and the seeds it needs."""
    shared = sorted(one.keys() & other.keys())
    differences = [accuracy(one[seed]) - accuracy(other[seed]) for seed in shared]
    return {**interval(differences, NOISE_PCT), "seeds_for_3_points": seeds_needed(differences)}


def seeds_needed(differences: Sequence[float]) -> int | None:
    """Seeds by which a difference of 3 points shows, from the spread of paired differences.

    Two-sided at 5 % with a power of 80 %, by the normal approximation: too few where it says few.
    """
    if len(differences) < 2:
        return None
    spread = statistics.stdev(differences)
    return math.ceil(((Z_TWO_SIDED + Z_POWER) * spread / POWER_DIFFERENCE_PCT) ** 2)


def level(row: Row, curve: str) -> float | None:
    """Mean of a curve over the last updates of a run."""
    known = [value for value in row["curves"][curve][-PLATEAU:] if value is not None]
    return statistics.fmean(known) if known else None


def by_seed(one: BySeed, other: BySeed, curve: str) -> list[float | None]:
    """The level of a curve less the other's, seed by seed; null where either has none."""
    levels = [
        (level(one[s], curve), level(other[s], curve)) for s in sorted(one.keys() & other.keys())
    ]
    return [None if a is None or b is None else a - b for a, b in levels]


def highest(row: Row, curve: str) -> float:
    """The largest value of a curve; 0 where it has none."""
    return max((value for value in row["curves"][curve] if value is not None), default=0.0)


def at_staleness(rows: BySeed) -> dict[str, Any]:
    """Figures of one estimator at one staleness, over its seeds."""
    each = list(rows.values())
    return {
        "seeds": sorted(rows),
        "diverged": sum(row["status"] == "diverged" for row in each),
        "accuracy_after_pct": interval([accuracy(row) for row in each], NOISE_PCT),
        "ratio_p99_of_the_last_updates": interval([level(row, "ratio_p99") for row in each]),
        "ratio_max": max(highest(row, "ratio_max") for row in each),
        "entropy_nats_of_the_last_updates": interval([level(row, "entropy_nats") for row in each]),
        "distinct_ids_per_token": interval([r["summary"]["distinct_ids_per_token"] for r in each]),
        "cache_bytes_per_token": interval([r["summary"]["cache_bytes_per_token"] for r in each]),
    }


def of_study(pairs: Sequence[tuple[str, str]], found: Table, control: str) -> dict[str, Any]:
    """Everything of one study. pairs: (one, other) of which the accuracies are subtracted."""
    names = dict.fromkeys(name for pair in pairs for name in pair)
    return {
        "by_estimator": {
            name: {
                "slope_pct_per_doubling": slopes(found[name]),
                "by_staleness": {k: at_staleness(r) for k, r in sorted(found[name].items())},
            }
            for name in names
            if name in found
        },
        "differences": {
            f"{one} - {other}": compared(found[one], found[other])
            for one, other in pairs
            if one in found and other in found
        },
        "control": controlled(
            control, found.get(control, {}).get(0, {}), found.get(next(iter(names)), {}).get(0, {})
        ),
    }


def compared(one: Mapping[int, BySeed], other: Mapping[int, BySeed]) -> dict[str, Any]:
    """One estimator less another, by staleness, and their slopes: each seed with itself."""
    shared = sorted(one.keys() & other.keys())
    slope_of, slope_of_other = slopes(one)["by_seed"], slopes(other)["by_seed"]
    steeper = [
        slope_of[seed] - slope_of_other[seed]
        for seed in sorted(slope_of.keys() & slope_of_other.keys())
        if slope_of[seed] is not None and slope_of_other[seed] is not None
    ]
    return {
        "by_staleness": {k: paired(one[k], other[k]) for k in shared},
        "ratio_p99_of_the_last_updates": {
            k: interval(by_seed(one[k], other[k], "ratio_p99")) for k in shared
        },
        "slope_pct_per_doubling": interval(steeper, slope_noise(shared)),
    }


def by_chance(said: Any) -> dict[str, Any]:
    """How many differences have an interval, leave 0 out, and would by chance alone.

    said: figures by name, nested; differences stand under names of DIFFERENCES.
    """
    return comparisons(*_differences(said))


DIFFERENCES = (
    "differences",
    "less_exact_pct",
    "less_none_pct",
    "less_tis_2_pct",
    "accuracy_less_sync_pct",
)


def _differences(said: Any) -> list[Any]:
    """The parts that hold differences, not those inside them."""
    if not isinstance(said, Mapping):
        return []
    found: list[Any] = []
    for name, part in cast(Mapping[str, Any], said).items():
        found += [part] if name in DIFFERENCES else _differences(part)
    return found


def controlled(name: str, wrong: BySeed, right: BySeed) -> dict[str, Any]:
    """Whether a control fails, as it must: worse than what is right, seed by seed."""
    shared = sorted(wrong.keys() & right.keys())
    return {
        "estimator": name,
        "accuracy_after_pct": interval([accuracy(row) for row in wrong.values()], NOISE_PCT),
        "fails": all(accuracy(wrong[s]) < accuracy(right[s]) for s in shared) if shared else None,
    }
