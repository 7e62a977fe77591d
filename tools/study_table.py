"""Print a grid of runs as a markdown table: means over seeds with 95% intervals.

python tools/study_table.py benchmarks/results/staleness.json importance_variance_over_run
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIGURES = ("accuracy_after_pct", "reward_last", "reward_best", "sampler_k3_nats_over_run")


def cell(figure: dict[str, Any]) -> str:
    """`72.1 ± 3.4`, or a dash."""
    if figure["mean"] is None:
        return "-"
    half = figure["half_width_95"]
    return f"{figure['mean']:.3g}" + ("" if half is None else f" ± {half:.2g}")


def table(study: dict[str, Any], figures: tuple[str, ...]) -> str:
    """One row per (setting, method)."""
    header = ["setting", "method", "seeds", "diverged", *figures]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for entry in study["entries"]:
        cells = [entry["setting"], entry["method"], str(len(entry["seeds"]))]
        cells += [str(entry["diverged"]), *(cell(entry["figures"][name]) for name in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    study = json.loads(Path(sys.argv[1]).read_text())
    print(table(study, (*FIGURES, *sys.argv[2:])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
