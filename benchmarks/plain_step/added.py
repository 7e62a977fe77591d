"""What the learner adds to a plain step, from the seconds of both and of the head's products."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

PLAIN_PRODUCTS, OUR_PRODUCTS = 3, 4
"""Products with the LM head in a step: forward, two gradients; the learner makes logits twice."""


def added(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return medians, ratios and what is left of the difference without the head's products.

    figures: seconds of each step by kind, the first not timed, and head_product_s of all positions
    and of the responses'. added_besides_head: of the plain step (packed); negative: it saves.
    """
    seconds = {kind: median(each[1:]) for kind, each in figures["step_s_of_each"].items()}
    head = {rows: median(each) for rows, each in figures["head_product_s"].items()}
    ours, plain = seconds["distil"], seconds["packed"]
    besides = (ours - OUR_PRODUCTS * head["responses"]) - (plain - PLAIN_PRODUCTS * head["all"])
    return {
        "step_s": seconds,
        "distil_over_packed": ours / plain,
        "distil_over_stock": ours / seconds["stock"],
        "recomputed_head_product": head["responses"] / plain,
        "distil_over_packed_without_recomputing": (ours - head["responses"]) / plain,
        "added_besides_head": besides / plain,
        "packing_and_metrics": median(figures["bookkeeping_s_of_each"][1:]) / plain,
    }
