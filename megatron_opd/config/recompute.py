"""Says which activations a learner recomputes, and which of Megatron's fields refine that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from megatron_opd.config.wording import shown

Recompute = Literal["none", "selective", "full"]

FEED_FORWARD = ("mlp", "moe")
"""What `selective` recomputes, in Megatron's words: dense feed-forward parts, and experts."""

REFINEMENTS: dict[str, Recompute] = {
    "recompute_modules": "selective",
    "recompute_method": "full",
    "recompute_num_layers": "full",
}
"""Megatron's fields that refine one value of learner.recompute."""


def refinement_problem(recompute: Recompute, megatron: Mapping[str, Any]) -> str | None:
    """Return why learner.megatron contradicts learner.recompute, or None."""
    for name, needed in REFINEMENTS.items():
        if name in megatron and recompute != needed:
            return (
                f"megatron.{name} has no effect unless recompute is {needed}, got {recompute}; "
                f"leave it out, or set recompute: {needed}"
            )
    modules = megatron.get("recompute_modules", [])
    names = cast("list[object]", modules) if isinstance(modules, list) else [None]
    if not all(isinstance(each, str) for each in names):
        got = shown(cast(object, modules))
        return f"megatron.recompute_modules must be a list of names, got {got}"
    return None


def unrefined(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's fields without those that refine learner.recompute."""
    return {name: value for name, value in megatron.items() if name not in REFINEMENTS}
