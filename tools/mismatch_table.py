"""Print the tables of docs/mismatch.md from the grid's record.

    python tools/mismatch_table.py benchmarks/results/mismatch_grid.json

First every server with every learner, then ratios with one factor changed, pair by pair: the same
responses, or for lengths and kernels the same prompts; each pair is one set of prompts.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Tree = dict[str, Any]
LEARNERS = ("1", "tp2", "cp2", "tp2_ep2")
MATCHED = {"tp1": "1", "tp2": "tp2", "tp2_ep2": "tp2_ep2"}
FIGURES = ("max_dp", "mean_dp")
KINDS = ("decode", "prefill", "decode_replayed", "decode_replayed_gates")


def cell(value: float) -> str:
    """A probability difference."""
    return f"{value:.1e}" if value < 1e-3 else f"{value:.3f}"


def grid_lines(cases: dict[str, Tree], kind: str, length: str) -> Iterator[str]:
    """The mean over sets of max_dp, a row for each server."""
    yield "| server | " + " | ".join(f"learner {name}" for name in LEARNERS) + " | itself |"
    yield "|---" * (len(LEARNERS) + 2) + "|"
    for name, case in cases.items():
        found = [case["learners"].get(learner, {}).get(kind) for learner in LEARNERS]
        cells = [cell(statistics.fmean(each[length]["max_dp"])) if each else "" for each in found]
        own = cell(statistics.fmean(case["decode_prefill"][length]["max_dp"]))
        yield f"| {name} | " + " | ".join([*cells, own]) + " |"


def what_differs(server: str, learner: str) -> str | None:
    """What is split otherwise; None: nothing."""
    if learner == MATCHED[server]:
        return None
    if server.startswith("tp2") != learner.startswith("tp2"):
        return "TP (with EP or CP or alone)"
    return "CP alone" if learner == "cp2" else "EP alone"


def layout_ratios(cases: dict[str, Tree]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Another learner's gap over that of the learner split like the server, same responses."""
    for case in cases.values():
        if case["deterministic"]:
            continue
        for learner, figures in case["learners"].items():
            differs = what_differs(case["server"], learner)
            if differs is None:
                continue
            alike = case["learners"][MATCHED[case["server"]]]
            for kind in sorted(figures.keys() & set(KINDS)):
                for length in ("1x", "5x"):
                    for figure in FIGURES:
                        pairs = zip(
                            figures[kind][length][figure], alike[kind][length][figure], strict=True
                        )
                        key = (case["model"], case["dtype"], differs, kind, figure)
                        yield from ((key, over / under) for over, under in pairs)


def length_ratios(cases: dict[str, Tree]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Long responses, their beginnings and the largest of five short ones over a short one."""
    for case in cases.values():
        if case["deterministic"]:
            continue
        for figures in case["learners"].values():
            for kind in sorted(figures.keys() & (set(KINDS) - {"prefill"})):
                short = figures[kind]["1x"]
                for length in ("5x", "1x_of_5", "5x_start"):
                    for figure in FIGURES:
                        if figure not in figures[kind][length]:
                            continue
                        key = (case["model"], case["dtype"], length, kind, figure)
                        pairs = zip(figures[kind][length][figure], short[figure], strict=True)
                        yield from ((key, over / under) for over, under in pairs)


def other_ratios(cases: dict[str, Tree]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Replayed experts over free ones, replayed gates over those; deterministic kernels or not."""
    for name, case in cases.items():
        plain = cases.get(name.removesuffix("-deterministic"))
        for learner, figures in case["learners"].items():
            for length in ("1x", "5x"):
                for figure in FIGURES:
                    free = figures["decode"][length][figure]
                    about = (case["model"], case["dtype"])
                    if "decode_replayed" in figures and not case["deterministic"]:
                        replayed = figures["decode_replayed"][length][figure]
                        pairs = zip(replayed, free, strict=True)
                        yield from (((*about, "replayed", "", figure), a / b) for a, b in pairs)
                    # absent from rows that were recorded before there were gates
                    if "decode_replayed_gates" in figures and not case["deterministic"]:
                        experts = figures["decode_replayed"][length][figure]
                        weighed = figures["decode_replayed_gates"][length][figure]
                        pairs = zip(weighed, experts, strict=True)
                        yield from (((*about, "gates", "", figure), a / b) for a, b in pairs)
                    if case["deterministic"] and plain is not None:
                        usual = plain["learners"][learner]["decode"][length][figure]
                        pairs = zip(free, usual, strict=True)
                        key = (*about, "deterministic", "", figure)
                        yield from ((key, a / b) for a, b in pairs)


def ratio_lines(found: Iterator[tuple[tuple[str, ...], float]]) -> Iterator[str]:
    """Median, least and largest ratio of each kind of pair, and how many are above 1."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for key, ratio in found:
        groups.setdefault(key, []).append(ratio)
    yield "| model | format | changed | compared | figure | median | least | largest | above 1 |"
    yield "|---" * 9 + "|"
    for key, ratios in sorted(groups.items()):
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        above = f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
        yield f"| {' | '.join(key)} | " + " | ".join(f"{r:.2f}" for r in spread) + f" | {above} |"


def main() -> int:
    """Entry point."""
    cases: dict[str, Tree] = json.loads(Path(sys.argv[1]).read_text())["cases"]
    measured = {kind for case in cases.values() for f in case["learners"].values() for kind in f}
    for kind in filter(measured.__contains__, KINDS):
        for length in ("1x", "5x"):
            print(f"\n{kind}, {length}\n", *grid_lines(cases, kind, length), sep="\n")
    for title, ratios in (
        ("layouts", layout_ratios),
        ("lengths", length_ratios),
        ("replay and kernels", other_ratios),
    ):
        print(f"\n{title}\n", *ratio_lines(ratios(cases)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
