"""Draws what `opd mismatch` measured: every response's largest and mean gap, and by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_opd.mismatch.report import NAMES

COLORS = ("#1d4ed8", "#d97706", "#059669", "#b91c1c")
FLOOR = 1e-9  # below it everything is drawn alike: a logarithmic axis has no zero
Tree = dict[str, Any]


def draw(figures: Tree, path: Path) -> None:
    """Write the plot; the ending decides the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (largest, mean, place) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    lengths = [response["tokens"] for response in figures["responses"]]
    for (name, found), color in zip(figures["comparisons"].items(), COLORS, strict=False):
        style = {"color": color, "label": NAMES[name]}
        for axes, key in ((largest, "max_dp"), (mean, "mean_dp")):
            values = [max(value, FLOOR) for value in found["by_response"][key]]
            axes.plot(lengths, values, ".", markersize=4, alpha=0.6, **style)
        middles = [(each["first"] + each["last"]) / 2 for each in found["by_position"]]
        means = [max(each["mean_dp"], FLOOR) for each in found["by_position"]]
        place.plot(middles, means, "o-", markersize=4, **style)
    titles = ("largest |p - q| of a response", "mean |p - q| of a response")
    for axes, title in zip((largest, mean), titles, strict=True):
        axes.set(title=title, xlabel="tokens of the response", yscale="log")
    place.set(title="mean |p - q| by position", xlabel="position in the response", yscale="log")
    place.legend(frameon=False, fontsize="small")
    largest.axhline(figures["threshold"], color="#94a3b8", linewidth=0.8, linestyle="--")
    for axes in (largest, mean, place):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
