"""Checks the rules on environments that involve several sections; see rules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_opd.config.tree import ConfigTree

Rule = Callable[[ConfigTree], str | None]


def _refused_beside(config: ConfigTree) -> str | None:
    """Refuse what a run with an environment does not do, one key after another."""
    if config.environment is None:
        return None
    for key, found, wanted, why in _beside(config):
        if found != wanted:
            return f"{key} must be {wanted} with section environment, {why}, got {found}"
    return None


def _beside(config: ConfigTree) -> list[tuple[str, Any, Any, str]]:
    """Return (key, value, what it must be, why)."""
    in_flight = config.schedule.in_flight
    return [
        (
            "data.chat_template",
            bool(config.data.chat_template),
            True,
            "which writes what the environment says",
        ),
        (
            "schedule.in_flight",
            in_flight,
            "in_place",
            "as a weight sync goes on between and within the turns of a trajectory",
        ),
        ("sites.members", list(config.sites.members), [], "which sites do not play"),
        ("workers.count", config.workers.count, 0, "as the controller plays trajectories itself"),
        (
            "evaluation.problems",
            _stated_problems(config),
            0,
            "as evaluations ask for single answers; leave it out, or set it 0",
        ),
    ]


def _stated_problems(config: ConfigTree) -> int:
    """Return what a file says; left out it becomes 0 (defaults.py)."""
    stated = "problems" in config.evaluation.model_fields_set
    return config.evaluation.problems if stated else 0


ENVIRONMENT_RULES: tuple[Rule, ...] = (_refused_beside,)
