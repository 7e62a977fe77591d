"""Draws what `opd eval --checkpoints` found: avg@k with its standard error, and pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = ("#1d4ed8", "#d97706", "#059669", "#b91c1c", "#7c3aed", "#0e7490")


def places_of(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, float], bool]:
    """Return {checkpoint: place on the axis}, and whether the places are updates.

    They are where every checkpoint has its own number of updates; otherwise checkpoints stand side
    by side in their order.
    """
    updates = {row["checkpoint"]: row["updates"] for row in rows}
    known = [each for each in updates.values() if each is not None]
    if len(known) == len(updates) == len(set(known)):
        return {path: float(each) for path, each in updates.items()}, True
    return {path: float(place) for place, path in enumerate(updates)}, False


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the plot; the ending decides the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    places, are_updates = places_of(rows)
    for number, name in enumerate(dict.fromkeys(row["set"] for row in rows)):
        color = COLORS[number % len(COLORS)]
        of_set = sorted(
            (row for row in rows if row["set"] == name), key=lambda row: places[row["checkpoint"]]
        )
        x = [places[row["checkpoint"]] for row in of_set]
        mean = [row["accuracy_pct"] for row in of_set]
        error = [row["stderr_pct"] or 0.0 for row in of_set]
        label = f"{name}: avg@{of_set[0]['samples']}"
        axes.errorbar(x, mean, error, color=color, marker="o", markersize=4, capsize=2, label=label)
        largest = max(of_set[0]["pass_at_k"], key=int)
        if int(largest) > 1:
            passes = [row["pass_at_k"].get(largest) for row in of_set]
            axes.plot(x, passes, "--", color=color, alpha=0.6, label=f"{name}: pass@{largest}")
    if not are_updates:
        names = ["/".join(Path(each).parts[-2:]) for each in places]
        axes.set_xticks(list(places.values()), names, rotation=30, ha="right", fontsize="small")
    axes.set(ylabel="right answers (%)", xlabel="updates" if are_updates else "", ylim=(0, 100))
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
