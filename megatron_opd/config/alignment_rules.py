"""Checks the rules on a teacher of another tokenizer that involve several sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_opd.config.objective import Objective
from megatron_opd.config.objectives import ReverseKl
from megatron_opd.config.tree import ConfigTree

KEY = "scoring.alignment"


def _aligned_teacher(config: ConfigTree) -> str | None:
    if config.scoring.alignment is None:
        return None
    if not config.estimator.reads_teacher:
        return (
            f"{KEY} has no effect: objective.type {config.objective.type} reads no teacher, got "
            f"{_unaligned(config)}; leave it null"
        )
    if config.teacher is None or config.teachers:
        named = ", ".join(config.all_teachers)
        return (
            f"{KEY} must be null with several teachers, or one that is not section teacher, whose "
            f"tokenizers would have to be aligned with each other too, got {named}; keep one in "
            "section teacher"
        )
    return None


def _beside_alignment(config: ConfigTree) -> str | None:
    if config.scoring.alignment is None or config.teacher is None:
        return None
    wanted: list[tuple[str, Any, Any, str]] = [
        (
            "teacher.source.type",
            config.teacher.source.type,
            "checkpoint",
            "whose teacher has a tokenizer of its own",
        ),
        (
            "workers.count",
            config.workers.count,
            0,
            "whose texts are compared where the controller is",
        ),
        (
            "sites.members",
            ", ".join(config.sites.members) or "none",
            "none",
            "whose texts are compared where the controller is",
        ),
        (
            "environment",
            "null" if config.environment is None else config.environment.type,
            "null",
            "which compares one answer at a time",
        ),
        (
            "metrics.health_every",
            config.metrics.health_every,
            0,
            "whose likeliest ids are none of the student's",
        ),
        (
            "metrics.leak_every",
            config.metrics.leak_every,
            0,
            "whose likeliest ids are none of the student's",
        ),
    ]
    for key, got, must, why in wanted:
        if got != must:
            return f"{key} must be {must} with {KEY}, {why}, got {got}; leave one of them out"
    return None


def _aligned_support(config: ConfigTree) -> str | None:
    if config.scoring.alignment is None:
        return None
    estimator = config.estimator
    kind = estimator.support.type
    if estimator.support.owner == "teacher":
        return (
            f"support.type must be one of the student's with {KEY}, since what a teacher of "
            f"another tokenizer selects are no ids of the student, got {kind}; use mc or topk"
        )
    direct = next((each for each in estimator.objectives if each.is_direct(estimator.use)), None)
    if kind == "exact" and direct is not None:
        return (
            f"support.type must not be exact with {KEY} and objective.type {_type(direct)}, which "
            "needs a score of every id, got exact; use topk, whose objective.outside says how the "
            "ids without a score count"
        )
    penal = next((each for each in _reading(config) if each.reads_reward), None)
    if penal is not None:
        return (
            f"objective.kl.to must not be teacher with {KEY}, because the penalty reads a score of "
            f"every sampled token, got teacher in objective.type {_type(penal)}; use to: sampler, "
            "or objective.type mixture with a term of reverse_kl"
        )
    return None


def _chunks(config: ConfigTree) -> str | None:
    if _unaligned(config) != "chunk":
        return None
    kind = config.estimator.support.type
    if kind != "path":
        return (
            f"support.type must be path with {KEY}.unaligned chunk, which compares what was "
            f"sampled alone, got {kind}; set it, or unaligned: drop"
        )
    for each in _reading(config):
        if not isinstance(each, ReverseKl) or each.advantage != "rollout":
            got = f"{_type(each)} with advantage {getattr(each, 'advantage', 'none')}"
            return (
                f"objective.type must be reverse_kl with advantage rollout with {KEY}.unaligned "
                "chunk, whose advantage is that of a whole chunk and the sampler's, got "
                f"{got}; set objective.advantage: rollout, or unaligned: drop"
            )
    return None


def _reading(config: ConfigTree) -> list[Objective]:
    """Return the objectives that read the teacher."""
    return [each for each in config.estimator.objectives if each.reads_teacher]


def _type(objective: Objective) -> str:
    return getattr(objective, "type", "")


def _unaligned(config: ConfigTree) -> str | None:
    return None if config.scoring.alignment is None else config.scoring.alignment.unaligned


ALIGNMENT_RULES: tuple[Callable[[ConfigTree], str | None], ...] = (
    _aligned_teacher,
    _beside_alignment,
    _aligned_support,
    _chunks,
)
