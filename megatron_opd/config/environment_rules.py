"""Checks the rules on environments that involve several sections; see rules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_opd.config.environment import UserConfig
from megatron_opd.config.selection import SoftPenalty
from megatron_opd.config.tree import ConfigTree
from megatron_opd.config.wording import listed, shown

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
    return [
        (
            "data.chat_template",
            bool(config.data.chat_template),
            True,
            "which writes what the environment says",
        ),
        (
            "data.continue_assistant",
            config.data.continue_assistant,
            False,
            "which answers whole turns",
        ),
    ]


def _evaluated_turns(config: ConfigTree) -> str | None:
    """Refuse evaluated turns that are longer than a turn may be."""
    if config.environment is None:
        return None
    most = config.environment.max_turn_tokens or config.rollout.max_new_tokens
    stated = {
        "evaluation.max_new_tokens": config.evaluation.max_new_tokens,
        **{
            f"data.heldout.{n}.max_new_tokens": s.max_new_tokens
            for n, s in config.data.heldout.items()
        },
    }
    for key, wanted in stated.items():
        if wanted is not None and wanted > most:
            return (
                f"{key} must be at most {most}, the longest turn with section environment, got "
                f"{wanted}; raise environment.max_turn_tokens, which leaves rollouts at "
                "rollout.max_new_tokens"
            )
    return None


def _credit(config: ConfigTree) -> str | None:
    """Refuse rewards of turns where nothing, or something else, would read them."""
    if config.environment is None or config.environment.credit == "trajectory":
        return None
    estimator, key = config.estimator, "environment.credit must be trajectory"
    if not estimator.reads_reward:
        return (
            f"{key} with objective.type {config.objective.type}, which reads no reward, got turn; "
            "use an objective from rewards, such as grpo"
        )
    for objective in estimator.objectives:
        if objective.reads_reward and not objective.reads_turns:
            return (
                f"{key} with objective.type {getattr(objective, 'type', '')}, whose loss reads one "
                "advantage a response, got turn; let it read cache.advantage_T and set its "
                "class's reads_turns"
            )
    if isinstance(config.selection.overlong, SoftPenalty):
        return (
            f"{key} with selection.overlong.type soft_penalty, which is of a whole trajectory and "
            "no turn's, got turn; use filter, mask or keep"
        )
    return None


def _user(config: ConfigTree) -> str | None:
    """Check that there is a teacher to play the user, whose servers are asked from here."""
    if not isinstance(config.environment, UserConfig):
        return None
    elsewhere: list[tuple[str, Any, Any]] = [
        ("workers.count", config.workers.count, 0),
        ("sites.members", list(config.sites.members), []),
    ]
    for key, found, wanted in elsewhere:
        if found != wanted:
            return (
                f"{key} must be {wanted} with environment.type user, as the controller itself asks "
                f"the teacher's servers that play it, got {found}; leave it out"
            )
    name, known = config.user_teacher, list(config.all_teachers)
    if name in known:
        return None
    if not known:
        return (
            "missing key 'teacher': environment.type user is played by a teacher's servers; add a "
            "section teacher with a model or urls"
        )
    return f"environment.teacher must be one of {listed(known)}, got {shown(name)}"


ENVIRONMENT_RULES: tuple[Rule, ...] = (_refused_beside, _evaluated_turns, _credit, _user)
