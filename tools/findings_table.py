"""Print the tables of docs/findings.md from their record.

    python tools/findings_table.py benchmarks/results/findings.json [STUDY ...]

One table a study: accuracy after the run by estimator and staleness, mean over seeds with its 95 %
interval where there are several; the slope against log2(k + 1), each seed's over the stalenesses
that it has; the 99th percentile of the ratio at the largest staleness.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ACCURACY, SLOPE, TAIL = (
    "accuracy_after_pct",
    "slope_pct_per_doubling",
    "ratio_p99_of_the_last_updates",
)


def shown(figure: dict[str, Any], digits: int = 1) -> str:
    """A mean with its interval; a dash where nothing was run."""
    if figure["mean"] is None:
        return "-"
    half = figure["half_width_95"]
    return f"{figure['mean']:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def of_study(name: str, said: dict[str, Any]) -> list[str]:
    """The lines of one table, and what its control did."""
    by_estimator = said["by_estimator"]
    stalenesses = sorted({int(k) for each in by_estimator.values() for k in each["by_staleness"]})
    heads = ["", *(f"k = {k}" for k in stalenesses), "slope", "p99 of the ratio", "bytes a token"]
    lines = [f"### {name} ({said['source']})", "", _row(heads), _row(["---"] * len(heads))]
    for estimator, each in by_estimator.items():
        at = {int(k): figures for k, figures in each["by_staleness"].items()}
        cells = [shown(at[k][ACCURACY]) if k in at else "-" for k in stalenesses]
        last = at[max(at)]
        ends = [shown(each[SLOPE]), shown(last[TAIL], 2), shown(last["cache_bytes_per_token"], 0)]
        lines.append(_row([f"`{estimator}`", *cells, *ends]))
    control = said["control"]
    verdict = {True: "fails, as it must", False: "DOES NOT FAIL", None: "not run"}
    accuracy = shown(control[ACCURACY])
    return [*lines, "", f"`{control['estimator']}` {verdict[control['fails']]}: {accuracy} %", ""]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print what argv names."""
    record, names = Path(sys.argv[1]), sys.argv[2:]
    studies = json.loads(record.read_text(encoding="utf-8"))["studies"]
    for name, said in studies.items():
        if said.get("by_estimator") and (not names or name in names):
            print("\n".join(of_study(name, said)))


if __name__ == "__main__":
    main()
