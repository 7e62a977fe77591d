"""Draw GEPO's Figs. 3 and 7 from its enumeration, Figs. 5 and 6 from runs.

    python tools/plot_delays.py theory docs/gepo_theory.png
    python tools/plot_delays.py runs docs/delays.png

Fig. 5: one line a method, over the updates at a constant delay of 64 with CPPO-KL. Fig. 6: each
point is an update of a run whose staleness was drawn or fixed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.tree import RESULTS
from studies.delays_study.grid import CONSTANT, KL, setting, trials
from studies.grid.trials import KeptRows, finished_rows

RECORDS = {"theory": "gepo", "runs": "delays_study"}

COLORS = {
    "grpo": "#1d4ed8",
    "tokens": "#1d4ed8",
    "gspo": "#d97706",
    "gepo": "#b91c1c",
    "response": "#059669",
}
NAMES = {"tokens": "GRPO (tokens)", "response": "p / q of a response", "gspo": "GSPO"}
NAMES |= {"gepo": "GEPO", "grpo": "GRPO"}
CURVES = {
    "importance_variance": "variance of the weights",
    "grad_norm": "gradient norm",
    "reward_mean": "reward of rollouts",
}
BY_DELAY = {
    "sampler_k3_nats": "KL(sampler || learner), nats",
    "importance_variance": "variance of the weights",
    "advantage_error": "error of E[advantage]",
}
LARGEST = setting(CONSTANT, KL)
FLOOR = 1e-9


def frame(columns: int, rows: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, [rows, columns]."""
    size = (3.6 * columns, 2.9 * rows)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def points(axes: Any, x: Sequence[float], y: Sequence[float], color: str, label: str) -> None:
    """A cloud of points on logarithmic axes; what is 0 up to rounding, or infinite, is left out."""
    shown = [(a, b) for a, b in zip(x, y, strict=True) if 0 < a < 1e9 and FLOOR < b < 1e9]
    if shown:
        axes.scatter(*zip(*shown, strict=True), s=5, color=color, label=label, alpha=0.5)
    axes.set_xscale("log")
    axes.set_yscale("log")


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Write what an axes shows."""
    axes.set_title(title, fontsize="small")
    axes.set_xlabel(x, fontsize="small")
    axes.set_ylabel(y, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="x-small")


def theory(study: dict[str, Any]) -> Any:
    """Figs. 3 and 7."""
    figure, ((left, right, variance, error),) = frame(4)
    kinds = {"bernoulli": (left, "two outcomes"), "gaussian": (right, "normal densities")}
    for name, (axes, title) in kinds.items():
        rows = study[name]
        for column, kind in ((3, "response"), (4, "gepo")):
            x, y = [row[2] for row in rows], [row[column] for row in rows]
            points(axes, x, y, COLORS[kind], "p / q" if kind == "response" else "p / E[q]")
        label(axes, f"Fig. 3: {title}", "KL(p || q), nats", "variance of the weight")
    found = study["sequences"]
    for kind, rows in found["points"].items():
        kl, spread, missed = ([row[i] for row in rows] for i in range(3))
        by = found["correlations"][kind]
        points(variance, kl, spread, COLORS[kind], f"{NAMES[kind]}: {by['variance_kl']:.2f}")
        points(error, spread, missed, COLORS[kind], f"{NAMES[kind]}: {by['variance_error']:.2f}")
    label(variance, "Fig. 7b, correlations", "KL of a response, nats", "variance of the weight")
    label(error, "Fig. 7a, correlations", "variance of the weight", "error of E[advantage]")
    return figure


def runs(study: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
    """Figs. 5 and 6."""
    figure, grid = frame(3, 2)
    for axes, (curve, title) in zip(grid[0], CURVES.items(), strict=True):
        for entry in study["entries"]:
            if entry["setting"] == LARGEST:
                mean = [
                    v if v is not None else float("nan") for v in entry["curves"][curve]["mean"]
                ]
                method = entry["method"]
                axes.plot(mean, color=COLORS[method], label=NAMES[method], linewidth=1.2)
        if curve != "reward_mean":
            axes.set_yscale("log")
        label(axes, f"Fig. 5, delay 64: {title}", "update", title)
    for axes, (curve, title) in zip(grid[1], BY_DELAY.items(), strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            x, y = of_updates(rows, method, curve)
            points(axes, x, y, COLORS[method], NAMES[method])
        axes.set_xscale("linear")
        label(axes, f"Fig. 6: {title}", "staleness of the batch, updates", title)
    return figure


def of_updates(
    rows: Sequence[dict[str, Any]], method: str, curve: str
) -> tuple[list[float], list[float]]:
    """Staleness and a figure, of every update of a method's runs."""
    found = [
        (old, value)
        for row in rows
        if row["method"] == method
        for old, value in zip(
            row["curves"]["staleness_mean_versions"], row["curves"][curve], strict=True
        )
        if old is not None and value is not None
    ]
    return [old for old, _ in found], [value for _, value in found]


def main() -> int:
    """Entry point."""
    what, picture = sys.argv[1], Path(sys.argv[2])
    study = json.loads((RESULTS / f"{RECORDS[what]}.json").read_text(encoding="utf-8"))
    if what == "theory":
        figure = theory(study)
    else:
        kept = finished_rows(trials(), KeptRows(RESULTS / f"{RECORDS[what]}_rows.jsonl"))
        figure = runs(study, list(kept.values()))
    figure.savefig(picture, dpi=100)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
