"""Draw the studies of docs/findings.md from their record.

    python tools/plot_findings.py benchmarks/results/findings.json docs

findings.png: one panel a study, accuracy after the run by staleness, the mean over seeds and its
95 % interval where there are several; the last panel is AsyncOPD's Fig. 5, the 99th percentile of
the ratio. findings_quantised.png: TIS, by correction, on the widest grid. findings_seconds.png:
accuracy against seconds of training, a line a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = ("#1d4ed8", "#d97706", "#b91c1c", "#059669", "#7c3aed", "#0891b2", "#4b5563")
COLUMNS = 3
ACCURACY, TAIL = "accuracy_after_pct", "ratio_p99_of_the_last_updates"
TAIL_OF = "surrogates"
WIDE = "int3"
WHOSE = {"learner_accuracy_after_pct": "learner's weights", ACCURACY: "servers' weights"}
CURVES = {
    "reward_mean": "reward",
    "sampler_start_k1_nats": "k1 estimate of KL(o || p0), nats",
    "sampler_start_k3_nats": "k3 estimate, nats",
    "entropy_nats": "entropy, nats",
    "response_tokens_mean": "tokens a response",
}


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


def staleness(studies: dict[str, Any], out: Path) -> None:
    """Draw every study of staleness, and the ratio's tail."""
    swept = {name: said for name, said in studies.items() if said.get("by_estimator")}
    panels, save = _panels(len(swept) + 1, out)
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
    save()


def quantised(studies: dict[str, Any], out: Path) -> None:
    """Draw accuracy by correction, and what happens during the runs on the widest grid."""
    by_correction = studies["quantised"]["by_sampler"].get(WIDE, {})
    block = studies["quantised"]["block"]
    panels, save = _panels(1 + len(CURVES), out)
    axes = panels[0]
    for shift, (figure, label) in enumerate(WHOSE.items()):
        axes.bar(
            [place + 0.4 * shift for place in range(len(by_correction))],
            [each[figure]["mean"] or 0.0 for each in by_correction.values()],
            yerr=[each[figure]["half_width_95"] or 0.0 for each in by_correction.values()],
            width=0.38,
            capsize=2,
            color=COLORS[shift],
            label=label,
        )
    axes.set_xticks([place + 0.2 for place in range(len(by_correction))], list(by_correction))
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylim(0, 100)
    axes.set_title("accuracy after, %", fontsize=9)
    axes.legend(fontsize=7)
    for axes, (curve, title) in zip(panels[1:], CURVES.items(), strict=True):
        for color, (name, each) in zip(COLORS, by_correction.items(), strict=False):
            points = each["by_block"][curve]
            updates = [block * (number + 1) for number in range(len(points))]
            axes.plot(updates, points, color=color, label=name, linewidth=1.2)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    save()


def seconds(studies: dict[str, Any], out: Path) -> None:
    """Draw accuracy against seconds of training, a line a run."""
    (axes,), save = _panels(1, out)
    by_schedule = studies["wall_clock"]["by_schedule"]
    for color, (name, each) in zip(COLORS, by_schedule.items(), strict=False):
        for number, points in enumerate(each["curves"]):
            label = None if number else name
            axes.plot(*zip(*points, strict=True), color=color, label=label, linewidth=1.0)
    axes.set_title("AsyncOPD Figs. 11-12", fontsize=9)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("accuracy, %")
    axes.grid(alpha=0.3)
    if by_schedule:
        axes.legend(fontsize=7)
    save()


def _panels(count: int, out: Path) -> tuple[list[Any], Callable[[], None]]:
    """So many panels, and what writes them to a file."""
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.1 * rows), layout="constrained", squeeze=False
    )
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.axis("off")

    def save() -> None:
        figure.savefig(out, dpi=110)
        plt.close(figure)

    return panels[:count], save


def main() -> None:
    """Draw what argv names."""
    record, out = Path(sys.argv[1]), Path(sys.argv[2])
    studies = json.loads(record.read_text(encoding="utf-8"))["studies"]
    staleness(studies, out / "findings.png")
    quantised(studies, out / "findings_quantised.png")
    seconds(studies, out / "findings_seconds.png")


if __name__ == "__main__":
    main()
