"""Draw the variance study.

python tools/plot_variance.py benchmarks/results/variance.json docs/variance.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

SHOWN = {
    "mc_16": "#93c5fd",
    "mc_64": "#1d4ed8",
    "atoms_tail_2_2": "#fbbf24",
    "atoms_tail_4_4": "#f97316",
    "atoms_tail_4_64_thin": "#16a34a",
    "atoms_tail_16_48": "#b91c1c",
}
FAMILY_COLORS = {
    "gaussian": "#b91c1c",
    "zipf": "#f59e0b",
    "geometric": "#7c3aed",
    "plateau": "#6b7280",
}
CROWDED = {"atoms_tail_15_49", "atoms_tail_24_40", "atoms_tail_32_32", "atoms_tail_12_52"}
FLOOR = 1e-12  # the axis ends here; less is not told apart from float32 rounding


def label(name: str) -> str:
    """mc_64 -> MC 64; atoms_tail_16_48 -> 16 atoms + 48; ..._thin -> 16 atoms + thin 48."""
    thin = "thin " if name.endswith("_thin") else ""
    kind, *numbers = name.removesuffix("_thin").rsplit("_", 1 if name.startswith("mc") else 2)
    return f"MC {numbers[0]}" if kind == "mc" else f"{numbers[0]} atoms + {thin}{numbers[1]}"


def staleness(axes: Any, pairs: list[dict[str, Any]]) -> None:
    """R_local over staleness, the mean over old versions' ratios drawn with their range."""
    ages = sorted({pair["staleness_updates"] for pair in pairs})
    for name, color in SHOWN.items():
        columns = [
            [
                max(pair["supports"][name]["r_local"], FLOOR)
                for pair in pairs
                if pair["staleness_updates"] == age
            ]
            for age in ages
        ]
        middles = [sorted(column)[len(column) // 2] for column in columns]
        axes.plot(ages, middles, "o-", color=color, label=label(name), markersize=3)
        lows, highs = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(ages, lows, highs, color=color, alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="staleness, updates", ylabel="variance / one draw")
    axes.set_title("shipped student, all prefixes")
    axes.legend(frameon=False, fontsize="x-small", ncols=2)


def frontier(axes: Any, pairs: list[dict[str, Any]]) -> None:
    """Worst R_local over pairs against what the cache stores."""
    for kind, color in (("mc", "#1d4ed8"), ("atoms_tail", "#b91c1c")):
        names = [name for name in pairs[0]["supports"] if name.startswith(kind)]
        for name in names:
            supports = [pair["supports"][name] for pair in pairs]
            ids = max(support["cached_ids_per_token"] for support in supports)
            worst = max(max(support["r_local"] for support in supports), FLOOR)
            axes.plot(ids, worst, "o", color=color, markersize=4)
            text = "" if name in CROWDED else label(name).replace(" atoms + ", "+")
            axes.annotate(text, (ids, worst), fontsize=6, xytext=(3, 2), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="cached ids a token")
    axes.set_title("worst variance against what is stored")


def synthetic(axes: Any, study: dict[str, Any]) -> None:
    """R over entropy at the larger staleness noise."""
    noise = max(row["stale_noise"] for row in study["rows"])
    for family, color in FAMILY_COLORS.items():
        rows = [r for r in study["rows"] if r["family"] == family and r["stale_noise"] == noise]
        entropies = [row["entropy_nats"] for row in rows]
        axes.plot(
            entropies, [max(r["r_fixed"], FLOOR) for r in rows], "o-", color=color, markersize=3
        )
        axes.plot(entropies, [max(r["r_best"], FLOOR) for r in rows], ":", color=color)
        axes.plot([], [], "-", color=color, label=family)
    axes.axhline(1 / study["size"], color="#1d4ed8", label=f"MC {study['size']}")
    axes.plot([], [], ":", color="black", label="best split")
    axes.set(yscale="log", xlabel="entropy, nats", title="152k ids, 16 atoms + 48")
    axes.legend(frameon=False, fontsize="x-small", loc="lower right")


def main() -> int:
    """Entry point."""
    figures = json.loads(Path(sys.argv[1]).read_text())
    figure, columns = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    staleness(columns[0], figures["pairs"])
    frontier(columns[1], figures["pairs"])
    synthetic(columns[2], figures["synthetic"])
    for axes in columns:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(sys.argv[2]), dpi=110)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
