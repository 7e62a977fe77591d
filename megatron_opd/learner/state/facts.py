"""Records what a learner's checkpoint says of itself: state.json. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint import state_files
from megatron_opd.checkpoint.stated_heads import STATE
from megatron_opd.config.wording import line, shown

FORMAT = 2


@dataclass(frozen=True, slots=True)
class LearnerFacts:
    """Holds what state.json says. updates: learner updates made. step: optimizer steps taken.

    heads: see stated_heads.Heads; empty in older checkpoints.
    """

    format: int
    updates: int
    step: int
    world_size: int
    parallel: dict[str, Any]
    dtype: str
    heads: dict[str, int] = field(default_factory=dict[str, int])


def read_facts(path: Path) -> LearnerFacts:
    """Read what a learner's checkpoint says of itself. ValueError: it is not readable as one."""
    raw = state_files.read_json(path / STATE)
    if raw.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {path} was written by another version: its format must be {FORMAT}, got "
            f"{shown(raw.get('format'))}"
        )
    try:
        facts = LearnerFacts(**raw)
    except TypeError as error:
        raise ValueError(f"checkpoint {path}: {STATE} is incomplete: {line(error)}") from None
    for name, least in (("updates", 0), ("step", 0), ("world_size", 1)):
        value = getattr(facts, name)
        if type(value) is not int or value < least:
            raise ValueError(
                f"checkpoint {path}: {name} of {STATE} must be >= {least}, got {shown(value)}"
            )
    if not isinstance(facts.parallel, dict) or not isinstance(facts.dtype, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"checkpoint {path}: parallel or dtype of {STATE} is damaged")
    return facts
