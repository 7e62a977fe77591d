"""Choose what a file leaves out by what the run learns from and what its sampler is.

docs/findings.md has the runs that these rest on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from megatron_opd.config.corrections import TruncatedCorrection
from megatron_opd.config.estimator import kinds_of
from megatron_opd.config.objective import CustomObjective
from megatron_opd.config.tree import ConfigTree

TRUNCATED = TruncatedCorrection(max_ratio=2.0, prox=True)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys by which a config.json says that a model is a mixture of experts."""


def has_experts(model: Path) -> bool:
    """Tell whether a checkpoint is a mixture of experts; one that is not here is not."""
    try:
        found: Any = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # what is wrong with it is said when the model is read
    if not isinstance(found, dict):
        return False
    config = cast(dict[str, Any], found)
    text: Any = config.get("text_config")
    read = cast(dict[str, Any], text) if isinstance(text, dict) else config
    counts = (read.get(key) for key in EXPERTS)
    return any(isinstance(count, int) and count > 0 for count in counts)


BYPASSES: dict[str, Callable[[Any], bool]] = {
    "moe_router_fusion": bool,
    "moe_router_load_balancing_type": lambda value: value == "sinkhorn",
    "moe_router_force_load_balancing": bool,
}
"""Settings of Megatron-Core 0.19.2, and which values keep routers from replaying experts."""


def is_coarse_mixture(config: ConfigTree) -> bool:
    """Tell whether routers choose in bfloat16, where learner and sampler choose differently."""
    coarse = "bfloat16" in (config.learner.dtype, config.student.dtype)
    return coarse and has_experts(config.student.model)


def quantised_by(config: ConfigTree) -> tuple[str, str] | None:
    """Return the key that makes the sampler's weights coarser, and its value; None: none does."""
    found = {
        "weight_sync.round_to": config.weight_sync.round_to,
        "student.quantization": config.student.quantization,
    }
    return next(((key, value) for key, value in found.items() if value is not None), None)


def why_truncated(config: ConfigTree) -> str | None:
    """Return why the ratio of learner to sampler is truncated unless a file says otherwise.

    None: it is whole. So it is where the objective needs it whole (gepo), is the user's own, or
    corrects nothing.
    """
    estimator = config.estimator
    objectives = estimator.objectives
    if any(each.replaces_ratio or isinstance(each, CustomObjective) for each in objectives):
        return None
    if all(each.is_direct(estimator.use) for each in objectives):
        return None
    kinds = zip(kinds_of(config.objective), objectives, strict=True)
    rewarded = [kind for kind, each in kinds if each.reads_reward]
    if rewarded:
        return f"{rewarded[0]} learns from rewards"
    quantised = quantised_by(config)
    if quantised is not None:
        return "{} is {}".format(*quantised)
    return "the student is a mixture of experts in bfloat16" if is_coarse_mixture(config) else None


def left_out(config: ConfigTree) -> dict[str, Any]:
    """Return what is chosen for the keys that a file leaves out, by key; empty: nothing else."""
    chosen: dict[str, Any] = {}
    if config.correction is None and why_truncated(config) is not None:
        chosen["correction"] = TRUNCATED.model_dump()
    named = "routing_replay" in config.learner.model_fields_set
    possible = not config.student.urls and not BYPASSES.keys() & config.learner.megatron.keys()
    if not named and possible and is_coarse_mixture(config):
        chosen["learner.routing_replay"] = "rollout"
    aligned = config.scoring.alignment is not None and config.data.chat_template
    if aligned and config.teacher is not None and config.teacher.chat_template is None:
        # the student's is written in tokens that another tokenizer does not have
        chosen["teacher.chat_template"] = True
    return chosen


def said(config: ConfigTree) -> list[tuple[str, str]]:
    """Return a row on the correction of the ratio: whether it is the default here, and why."""
    why, applied, estimator = why_truncated(config), config.correction, config.estimator
    if why is None and not estimator.uses_ratio:
        return []
    if applied == TRUNCATED and why is not None:
        text = f"ratio truncated at {TRUNCATED.max_ratio:g}, with prox: the default, since {why}"
    elif applied is not None:
        usual = "whole" if why is None else f"truncated with prox, since {why}"
        text = f"{applied.type}, as the file says; by default the ratio would be {usual}"
    elif any(objective.replaces_ratio for objective in estimator.objectives):
        text = "whole: the objective replaces it by a weight of its own"
    else:
        text = "whole: the default of distillation from a sampler that is not quantised"
    return [("correction", text)]


def bounds(config: ConfigTree) -> str | None:
    """Return what bounds an update where the clip of the objective never acts; None: it can."""
    estimator = config.estimator
    bounded = any(objective.trust_region.bounds for objective in estimator.objectives)
    if not bounded or config.learner.num_mini_batches > 1 or not estimator.applied_correction.prox:
        return None
    optimizer = config.learner.optimizer
    return (
        "objective.trust never acts: with correction.prox and learner.num_mini_batches 1 the ratio "
        "it bounds is always 1. What bounds an update is learner.optimizer.lr "
        f"{optimizer.lr:g} with clip_grad {optimizer.clip_grad:g}; raise num_mini_batches for "
        "several steps a batch, which the clip then bounds"
    )
