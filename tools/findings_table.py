"""Tables and figures of the record of `python -m studies findings`, for tools/pages.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ACCURACY, SLOPE, TAIL = (
    "accuracy_after_pct",
    "slope_pct_per_doubling",
    "ratio_p99_of_the_last_updates",
)
PILOT_RUN = re.compile(r"k(?P<k>\d+)_(?P<lr>[\dp]+e-\d+)-(?P<estimator>\w+)-\d+")
PILOT_COLUMNS = (("theta", 0), ("theta", 64), ("mc64", 0), ("mc64", 64))

Records = Callable[[str], Any]
"""A record by its name."""
Said = Mapping[str, Any]
Lines = list[str]


def shown(figure: Said | None, digits: int = 1, *, signed: bool = False) -> str:
    """A mean with its interval; a dash where nothing was run."""
    if figure is None or figure["mean"] is None:
        return "-"
    half = figure["half_width_95"]
    mean = f"{figure['mean']:{'+' if signed else ''}.{digits}f}"
    return mean + ("" if half is None else f" ± {half:.{digits}f}")


def small(figure: Said) -> str:
    """A mean that may have any size, with two digits."""
    return "-" if figure["mean"] is None else f"{figure['mean']:.1e}"


def of_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """The lines of a table."""
    return [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def swept(studies: Said) -> dict[str, Said]:
    """The studies of staleness that have rows."""
    return {name: said for name, said in studies.items() if said.get("by_estimator")}


def pilot(studies: Said) -> Lines:
    """Accuracy by learning rate."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for run in studies["pilot"]["runs"]:
        name = PILOT_RUN.fullmatch(run["name"])
        assert name is not None, run["name"]
        point = (name["estimator"], int(name["k"]))
        lr = name["lr"].replace("p0", "")
        found.setdefault(lr, {})[point] = run["student_accuracy_after_pct"]
    heads = ["learning rate", *(f"`{estimator}`, k = {k}" for estimator, k in PILOT_COLUMNS)]
    rows = [
        [lr, *(f"{points[point]:.1f}" for point in PILOT_COLUMNS)]
        for lr, points in sorted(found.items(), key=lambda item: float(item[0]))
    ]
    return of_rows(heads, rows)


def sweep(studies: Said) -> Lines:
    """Accuracy by estimator and staleness, slopes, the ratio's tail and bytes."""
    found: dict[str, Said] = {}
    for said in swept(studies).values():
        found |= said["by_estimator"]
    stalenesses = sorted({int(k) for each in found.values() for k in each["by_staleness"]})
    last = str(max(stalenesses))
    heads = ["", *(f"k = {k}" for k in stalenesses), "slope"]
    heads += [f"p99 at {last}", f"largest at {last}", "bytes a token"]
    rows: list[list[str]] = []
    for name, each in found.items():
        at = each["by_staleness"]
        accuracies = [shown(at[str(k)][ACCURACY]) if str(k) in at else "-" for k in stalenesses]
        end = at[max(at, key=int)]
        tail = shown(end[TAIL], 2) if last in at else "-"
        largest = f"{end['ratio_max']:.2g}" if last in at else "-"
        size = f"{end['cache_bytes_per_token']['mean']:.0f}"
        rows.append([f"`{name}`", *accuracies, shown(each[SLOPE], 2), tail, largest, size])
    control = next(iter(swept(studies).values()))["control"]
    rows.append([f"`{control['estimator']}`", shown(control[ACCURACY]), *["-"] * (len(heads) - 2)])
    return of_rows(heads, rows)


def differences(studies: Said) -> Lines:
    """Paired differences of accuracies and slopes, and the seeds that 3 points need."""
    found = {name: said["differences"] for name, said in swept(studies).items()}
    stalenesses = sorted(
        {
            int(k)
            for pairs in found.values()
            for each in pairs.values()
            for k, difference in each["by_staleness"].items()
            if difference["n"] > 1
        }
    )
    heads = ["", "", *(f"k = {k}" for k in stalenesses), "slope", "seeds for 3 points"]
    rows: list[list[str]] = []
    for name, pairs in found.items():
        for pair, each in pairs.items():
            at = each["by_staleness"]
            cells = [shown(at.get(str(k)), signed=True) for k in stalenesses]
            needed = [
                at[str(k)]["seeds_for_3_points"] if str(k) in at else None for k in stalenesses
            ]
            needs = ", ".join("-" if count is None else str(count) for count in needed)
            rows.append([name, f"`{pair}`", *cells, shown(each[SLOPE], 2, signed=True), needs])
    return of_rows(heads, rows)


def quantised(studies: Said) -> Lines:
    """Accuracy, gap, weights, entropy and length by sampler and correction."""
    heads = [
        "sampler",
        "correction",
        "seeds",
        "accuracy: learner",
        "less exact",
        "less `none`",
        "servers",
        "collapsed",
        "KL(o \\|\\| p0), nats",
    ]
    heads += [
        "k1 = log p0 - log p, nats",
        "updates where it is negative",
        "largest variance of the weight",
        "entropy",
        "tokens",
    ]
    rows: list[list[str]] = []
    for sampler, by_correction in studies["quantised"]["by_sampler"].items():
        for name, each in by_correction.items():
            last = each["of_the_last_updates"]
            share = each["k1_negative_share"]["mean"]
            rows.append(
                [
                    sampler,
                    f"`{name}`",
                    str(len(each["seeds"])),
                    shown(each["learner_accuracy_after_pct"]),
                    shown(each["less_exact_pct"], signed=True),
                    shown(each["less_none_pct"], signed=True),
                    shown(each[ACCURACY]),
                    str(each["collapsed"]),
                    small(last["sampler_start_k3_nats"]),
                    small(each["k1_nats"]),
                    "-" if share is None else f"{100 * share:.0f} %",
                    f"{max(each['importance_variance_largest']):.1e}",
                    shown(last["entropy_nats"], 2),
                    shown(last["response_tokens_mean"]),
                ]
            )
    return of_rows(heads, rows)


def wall_clock(studies: Said) -> Lines:
    """Seconds of training, accuracy and seconds to an accuracy by schedule."""
    by_schedule = studies["wall_clock"]["by_schedule"]
    targets = list(next(iter(by_schedule.values()))["seconds_to_pct"]) if by_schedule else []
    heads = ["schedule", "seeds", "seconds", "times as fast as `sync`", "overlap", "staleness"]
    heads += ["accuracy after", "less `sync`"]
    heads += [f"seconds to {target} %" for target in targets]
    rows = [
        [
            f"`{schedule}`",
            str(len(each["seeds"])),
            shown(each["seconds"]),
            shown(each["times_as_fast_as_sync"], 2),
            shown(each["overlap"], 2),
            shown(each["staleness_mean_versions"], 2),
            shown(each[ACCURACY]),
            shown(each["accuracy_less_sync_pct"], signed=True),
            *(_reached(each["seconds_to_pct"][target], len(each["seeds"])) for target in targets),
        ]
        for schedule, each in by_schedule.items()
    ]
    return of_rows(heads, rows)


def _reached(figure: Said, seeds: int) -> str:
    """Seconds, and how many runs have reached it where not all have."""
    there = figure["n"]
    return shown(figure, 0) + (f" ({there} of {seeds})" if there < seeds else "")


def earlier(record: Said) -> Lines:
    """The runs of more updates: accuracy of the servers' weights by sampler and correction."""
    found: Said = record["quantised_of_more_updates"]["by_sampler"]
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    rows = [
        [sampler, *(_runs(by_correction.get(name, [])) for name in names)]
        for sampler, by_correction in found.items()
    ]
    return of_rows(["sampler", *(f"`{name}`" for name in names)], rows)


def _runs(runs: Sequence[Said]) -> str:
    """Accuracies of single runs; those of another seed than 1 with it."""
    each = [(f"{run['accuracy_after_pct']:.1f}", run["seed"]) for run in runs]
    return ", ".join(text if seed == 1 else f"{text} (seed {seed})" for text, seed in each) or "-"


def at(studies: Said, estimator: str, staleness: int, figure: str = ACCURACY) -> Any:
    """A figure of an estimator at one staleness."""
    return _estimator(studies, estimator)["by_staleness"][str(staleness)][figure]


def slope(studies: Said, estimator: str) -> Said:
    """Points lost for each unit of log2(k + 1)."""
    return _estimator(studies, estimator)[SLOPE]


def versus(studies: Said, one: str, other: str, staleness: int | None = None) -> Said:
    """Accuracy of one less another's at a staleness; without one the difference of their slopes."""
    found = _pair(studies, one, other)
    return found[SLOPE] if staleness is None else found["by_staleness"][str(staleness)]


def tail(studies: Said, one: str, other: str, staleness: int) -> Said:
    """The ratio's 99th percentile of one less another's."""
    return _pair(studies, one, other)[TAIL][str(staleness)]


def rounded(studies: Said, sampler: str, correction: str, *path: str) -> Any:
    """A figure of GRPO with a sampler and a correction."""
    return _inside(studies["quantised"]["by_sampler"][sampler][correction], path)


def schedule(studies: Said, name: str, *path: str) -> Any:
    """A figure of the study of accuracy against seconds."""
    return _inside(studies["wall_clock"]["by_schedule"][name], path)


def gain(studies: Said, name: str) -> Said:
    """How many times as fast as `sync` a schedule is, less one."""
    times = schedule(studies, name, "times_as_fast_as_sync")
    return {**times, "mean": times["mean"] - 1}


def control_fails(studies: Said, name: str) -> bool:
    """Whether the control of a study failed, as it must."""
    return bool(studies[name]["control"]["fails"])


def _inside(found: Any, path: Sequence[str]) -> Any:
    for key in path:
        found = found[key]
    return found


def _estimator(studies: Said, name: str) -> Said:
    each = (said["by_estimator"] for said in swept(studies).values())
    return next(found[name] for found in each if name in found)


def _pair(studies: Said, one: str, other: str) -> Said:
    each = (said["differences"] for said in swept(studies).values())
    return next(found[f"{one} - {other}"] for found in each if f"{one} - {other}" in found)


TABLES: dict[str, Callable[[Said], Lines]] = {
    "pilot": pilot,
    "sweep": sweep,
    "differences": differences,
    "quantised": quantised,
    "wall_clock": wall_clock,
}
FIGURES: dict[str, Callable[..., Any]] = {
    "at": at,
    "slope": slope,
    "versus": versus,
    "tail": tail,
    "rounded": rounded,
    "schedule": schedule,
    "gain": gain,
    "control_fails": control_fails,
}
"""Of the studies, by the name that a page's source calls."""
