"""Draw GEPO's Figs. 3 and 7 from its enumeration, Figs. 5 and 6 from runs; print Table 2.

    python tools/plot_delays.py theory benchmarks/results/gepo.json docs/gepo_theory.png
    python tools/plot_delays.py runs benchmarks/results/staleness.json ROWS docs/delays.png
    python tools/plot_delays.py table ROWS
    python tools/plot_delays.py differences benchmarks/results/delays_study.json

ROWS: benchmarks/results/delays_study_rows.jsonl.

Fig. 5: one line a method, over the updates at a delay of 64. Fig. 6: each point is an update of a
run whose staleness was drawn or fixed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

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
LARGEST = "delay_64"
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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Table 2: best and last accuracy in percent, means over seeds, seeds in parentheses."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    lines = ["| delays, penalty | GRPO best, last | GSPO best, last | GEPO best, last |"]
    lines.append("|---|---|---|---|")
    for setting in settings:
        cells = [cell(rows, setting, method) for method in ("grpo", "gspo", "gepo")]
        lines.append(f"| {setting.replace('_', ', ', 1).replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(rows: Sequence[dict[str, Any]], setting: str, method: str) -> str:
    """`71.9, 64.1 (3)`, or a dash."""
    mine = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
    if not mine:
        return "-"
    keys = ("student_accuracy_best_pct", "student_accuracy_after_pct")
    means = [statistics.fmean(row["summary"][key] for row in mine) for key in keys]
    return f"{means[0]:.1f}, {means[1]:.1f} ({len(mine)})"


def differences(study: dict[str, Any]) -> str:
    """GEPO less the others in points, best and last, with 95% intervals over seeds."""
    found = study["differences"]
    columns = list(next(iter(found.values())))
    lines = ["| delays, penalty | " + " | ".join(c.replace("_", " ") for c in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name, row in found.items():
        cells = [interval_cell(row[column]) for column in columns]
        lines.append(f"| {name.replace('_', ', ', 1).replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval_cell(figure: dict[str, Any]) -> str:
    """`+4.4 ± 6.2`, or a dash."""
    if figure["half_width_95"] is None:
        return "-"
    return f"{figure['mean']:+.1f} ± {figure['half_width_95']:.1f}"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The newest row of every run."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({row["name"]: row for row in rows}.values())


def main() -> int:
    """Entry point."""
    what, *paths = sys.argv[1], *map(Path, sys.argv[2:])
    if what == "table":
        print(table(rows_of(paths[0])))
        return 0
    study = json.loads(paths[0].read_text())
    if what == "differences":
        print(differences(study))
        return 0
    figure = theory(study) if what == "theory" else runs(study, rows_of(paths[1]))
    figure.savefig(paths[-1], dpi=100)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
