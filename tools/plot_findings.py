"""Draw the studies of docs/findings.md from their record.

    python tools/plot_findings.py benchmarks/results/findings.json docs/findings.png

One panel a study: accuracy after the run by staleness, the mean over seeds and its 95 % interval
where there are several. The last panel is AsyncOPD's Fig. 5: the 99th percentile of the ratio.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = ("#1d4ed8", "#d97706", "#b91c1c", "#059669", "#7c3aed")
COLUMNS = 3
ACCURACY, TAIL = "accuracy_after_pct", "ratio_p99_of_the_last_updates"
TAIL_OF = "surrogates"


def draw(axes: Any, by_estimator: dict[str, Any], figure: str) -> None:
    """One line an estimator. x: the staleness, on a scale of log2(k + 1)."""
    stalenesses: set[int] = set()
    for color, (name, said) in zip(COLORS, by_estimator.items(), strict=False):
        points = {int(k): each[figure] for k, each in said["by_staleness"].items()}
        known = {k: point for k, point in points.items() if point["mean"] is not None}
        stalenesses |= known.keys()
        axes.errorbar(
            [k + 1 for k in known],
            [point["mean"] for point in known.values()],
            yerr=[point["half_width_95"] or 0.0 for point in known.values()],
            color=color,
            label=name,
            marker="o",
            markersize=3,
            linewidth=1.2,
            elinewidth=0.6,
            capsize=2,
        )
    axes.set_xscale("log", base=2)
    ticks = sorted(stalenesses)
    axes.set_xticks([k + 1 for k in ticks], [str(k) for k in ticks])
    axes.minorticks_off()
    axes.set_xlabel("staleness k, updates")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def main() -> None:
    """Draw what argv names."""
    record, out = Path(sys.argv[1]), Path(sys.argv[2])
    studies = json.loads(record.read_text(encoding="utf-8"))["studies"]
    swept = {name: said for name, said in studies.items() if said.get("by_estimator")}
    count = len(swept) + 1
    rows = -(-count // COLUMNS)
    figure, grid = plt.subplots(
        rows, COLUMNS, figsize=(4.2 * COLUMNS, 3.1 * rows), layout="constrained", squeeze=False
    )
    panels = list(grid.flat)
    for axes, (name, said) in zip(panels, swept.items(), strict=False):
        draw(axes, said["by_estimator"], ACCURACY)
        axes.set_title(f"{name} ({said['source']})", fontsize=9)
        axes.set_ylabel("accuracy, %")
        axes.set_ylim(0, 100)
    if TAIL_OF in swept:
        axes = panels[len(swept)]
        draw(axes, swept[TAIL_OF]["by_estimator"], TAIL)
        axes.set_yscale("log")
        axes.set_title("99th percentile of the ratio (AsyncOPD Fig. 5)", fontsize=9)
    for axes in panels[count:]:
        axes.axis("off")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
