"""Draw the curves of a grid of runs: a row per setting, a column per figure, a line per method.

    python tools/plot_grid.py benchmarks/results/staleness.json docs/staleness.png

Lines are means over seeds, each smoothed over a few updates; bands their 95% intervals, cut at the
frame, which holds the lines.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = {  # by benchmark: curve -> (title, logarithmic)
    "staleness": {
        "reward_mean": ("reward of rollouts", False),
        "importance_variance": ("variance of the importance weight", True),
        "grad_norm": ("gradient norm", True),
        "sampler_k3_nats": ("KL sampler-learner (k3), nats", True),
        "response_tokens_mean": ("response length, tokens", False),
    },
}
COLORS = (
    "#1d4ed8",
    "#d97706",
    "#b91c1c",
    "#059669",
    "#7c3aed",
    "#0891b2",
    "#db2777",
    "#65a30d",
    "#475569",
)
FLOOR = 1e-300  # a band that reaches 0 goes on to the bottom of a logarithmic axis


def drawable(values: Sequence[float | None]) -> list[float]:
    """Missing values as nan."""
    return [math.nan if value is None else value for value in values]


def draw(axes: Any, entry: dict[str, Any], curve: str, color: str) -> None:
    """One method's line."""
    mean = drawable(entry["curves"][curve]["mean"])
    axes.plot(range(1, len(mean) + 1), mean, color=color, label=entry["method"], linewidth=1.2)


def shade(axes: Any, entry: dict[str, Any], curve: str, color: str, floor: float) -> None:
    """Its band."""
    mean, half = (drawable(entry["curves"][curve][part]) for part in ("mean", "half_width_95"))
    low = [max(m - h, floor) for m, h in zip(mean, half, strict=True)]
    high = [m + h for m, h in zip(mean, half, strict=True)]
    updates = range(1, len(mean) + 1)
    axes.fill_between(updates, low, high, color=color, alpha=0.12, linewidth=0)


def main() -> int:
    """Entry point."""
    study = json.loads(Path(sys.argv[1]).read_text())
    columns = COLUMNS[study["benchmark"]]
    settings = list(dict.fromkeys(entry["setting"] for entry in study["entries"]))
    methods = list(dict.fromkeys(entry["method"] for entry in study["entries"]))
    figure, grid = plt.subplots(
        len(settings),
        len(columns),
        figsize=(3.3 * len(columns), 2.3 * len(settings)),
        layout="constrained",
        sharex=True,
        squeeze=False,
    )
    for row, setting in zip(grid, settings, strict=True):
        for axes, (curve, (title, logarithmic)) in zip(row, columns.items(), strict=True):
            shown = [entry for entry in study["entries"] if entry["setting"] == setting]
            colors = [COLORS[methods.index(entry["method"])] for entry in shown]
            for entry, color in zip(shown, colors, strict=True):
                draw(axes, entry, curve, color)
            if logarithmic:
                axes.set_yscale("log", nonpositive="mask")
            limits = axes.get_ylim()
            for entry, color in zip(shown, colors, strict=True):
                shade(axes, entry, curve, color, FLOOR if logarithmic else -math.inf)
            axes.set_ylim(limits)
            axes.set_title(f"{setting}: {title}", fontsize="small")
            axes.spines[["top", "right"]].set_visible(False)
        row[0].legend(frameon=False, fontsize="x-small")
    for axes in grid[-1]:
        axes.set_xlabel("learner update", fontsize="small")
    figure.savefig(Path(sys.argv[2]), dpi=100)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
