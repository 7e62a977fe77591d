"""Draw the study of a pretrained model's prefixes.

python tools/plot_prefixes.py benchmarks/results/prefixes.json docs/prefixes.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

KINDS = {
    "Monte Carlo": ("mc_", "", "#1d4ed8"),
    "atoms + tail": ("atoms_tail_", "", "#b91c1c"),
    "atoms + thin tail": ("atoms_tail_", "_thin", "#16a34a"),
}
SHOWN = {
    "mc_16": "#93c5fd",
    "mc_64": "#1d4ed8",
    "atoms_tail_4_4": "#f97316",
    "atoms_tail_4_64_thin": "#16a34a",
    "atoms_tail_16_64_thin": "#15803d",
    "atoms_tail_16_48": "#b91c1c",
}
MOST_BYTES = 1100
FLOOR = 1e-7  # of the axis


def label(name: str) -> str:
    """Return what a support is called in a legend."""
    words = name.removeprefix("atoms_tail_").split("_")
    if words[0] == "mc":
        return f"MC {words[1]}"
    return f"{words[0]} + thin {words[1]}" if len(words) == 3 else f"{words[0]} + {words[1]}"


def of_kind(names: list[str], start: str, end: str) -> list[str]:
    """Return the supports of a kind."""
    return [n for n in names if n.startswith(start) and n.endswith("_thin") == bool(end)]


def frontier(axes: Any, figures: dict[str, Any], pair: dict[str, Any]) -> None:
    """Draw R of the gradient against bytes: every support, and top-k's mean squared error."""
    for title, (start, end, color) in KINDS.items():
        names = of_kind(list(pair["r_gradient"]), start, end)
        sizes = [figures["sizes"][name]["wire_bytes"] for name in names]
        ratios = [pair["r_gradient"][name] for name in names]
        style = "o-" if start == "mc_" else "o"
        axes.plot(sizes, ratios, style, color=color, markersize=3, label=title, linewidth=1)
    for outside, style in (("left", "x"), ("renormalised", "+")) if "top_k" in pair else ():
        tops = pair["top_k"][outside]
        sizes = [figures["sizes"][name]["wire_bytes"] for name in tops]
        errors = [top["mse_r_gradient"] for top in tops.values()]
        axes.plot(sizes, errors, style + ":", color="#6b7280", label=f"top-k, {outside}: bias²")
    if "mse_r_gradient" in pair:
        axes.axhline(
            pair["mse_r_gradient"], color="#6b7280", linestyle=":", label="truncation: bias²"
        )
    axes.set(xscale="log", yscale="log", xlabel="bytes a token, all wires")
    axes.set_xlim(left=20, right=MOST_BYTES)
    axes.set_ylabel("gradient: error² / variance of one draw")
    axes.set_title(title_of(pair))
    axes.legend(frameon=False, fontsize="x-small")


def title_of(pair: dict[str, Any]) -> str:
    """Return what a pair is called."""
    cut = ", ratios cut at 2" if "of_untruncated" in pair else ""
    return f"{pair['staleness_updates']} updates stale{cut}"


def by_entropy(axes: Any, pair: dict[str, Any]) -> None:
    """Draw R of the gradient in each bin of entropy."""
    bins = pair["bins"]
    places = range(len(bins))
    for name, color in SHOWN.items():
        ratios = [max(part["r_gradient"][name], FLOOR) for part in bins]
        axes.plot(places, ratios, "o-", color=color, markersize=3, label=label(name))
    axes.set_xticks(places, [edges(part) for part in bins], fontsize="small")
    axes.set(yscale="log", xlabel="entropy of the old student, nats")
    axes.set_title(f"by entropy, {title_of(pair)}")
    axes.legend(frameon=False, fontsize="x-small")


def shares(axes: Any, figures: dict[str, Any]) -> None:
    """Draw which share of prefixes and of one draw's variance each bin of entropy has."""
    pairs = figures["truncated"]["pairs"]
    bins = pairs[0]["bins"]
    width = 0.8 / (1 + len(pairs))
    total = figures["prefixes"]
    columns = {"prefixes": [part["prefixes"] / total for part in bins]}
    for pair in pairs:
        name = f"variance, {pair['staleness_updates']} updates stale"
        columns[name] = [part["gradient_variance_share"] for part in pair["bins"]]
    for index, (name, values) in enumerate(columns.items()):
        color = "#6b7280" if index == 0 else plt.colormaps["viridis"](index / len(columns))
        places = [place + index * width for place in range(len(bins))]
        axes.bar(places, [100 * value for value in values], width, color=color, label=name)
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(bins))],
        [edges(part) for part in bins],
        fontsize="small",
    )
    axes.set(xlabel="entropy of the old student, nats", ylabel="%")
    axes.set_title("who holds the gradient's variance")
    axes.legend(frameon=False, fontsize="x-small")


def edges(part: dict[str, Any]) -> str:
    """Return the name of a bin."""
    if part["to_nats"] is None:
        return f"> {part['from_nats']:g}"
    return f"{part['from_nats']:g}-{part['to_nats']:g}"


def main() -> int:
    """Draw the picture."""
    figures = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    figure, columns = plt.subplots(1, 4, figsize=(18, 4.2), layout="constrained")
    first, last = figures["pairs"][0], figures["truncated"]["pairs"][-1]
    frontier(columns[0], figures, first)
    frontier(columns[1], figures, last)
    by_entropy(columns[2], last)
    shares(columns[3], figures)
    for axes in columns:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(sys.argv[2]), dpi=100)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
