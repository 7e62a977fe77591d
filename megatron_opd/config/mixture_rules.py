"""Checks the rules on mixtures of teachers that involve several sections; see rules.py."""

from __future__ import annotations

from megatron_opd.config.supports import TeacherTopkSupport
from megatron_opd.config.tree import ConfigTree

NO_TOPK = (
    "the likeliest ids of a mixture are known to none of its teachers; use teacher_mc, or a "
    "support of the student's such as topk"
)


def may_mix(config: ConfigTree) -> bool:
    """Tell whether a prompt's cached ids may be those of a mixture of teachers."""
    return not isinstance(config.estimator.support, TeacherTopkSupport)


def most_draws(config: ConfigTree) -> int:
    """Return how many random draws a position of the cache has at most, the path excluded.

    Each teacher of a mixture makes a whole number of them (rollout/mixing.py).
    """
    support = config.estimator.support
    mixes = bool(config.scoring.mixture) or config.data.teacher_key is not None
    teachers = len(config.all_teachers) if mixes and support.owner == "teacher" else 1
    return support.num_draws + (teachers - 1 if support.num_draws else 0)


def mixture_problem(config: ConfigTree) -> str | None:
    """Return why scoring.mixture does not go together with other keys, or None."""
    mixture, estimator = config.scoring.mixture, config.estimator
    if not mixture:
        return None
    if not estimator.asks_teacher:
        return (
            f"scoring.mixture has no effect: objective.type {config.objective.type} reads no "
            "teacher; leave it out"
        )
    if config.data.teacher_key is not None:
        return (
            "scoring.mixture must be left out with data.teacher_key, whose column says for each "
            f"prompt who scores it, got {config.data.teacher_key}; write the mixture there, or set "
            "data.teacher_key: null"
        )
    return _names(config) or _beside(config)


def _names(config: ConfigTree) -> str | None:
    mixture, teachers = config.scoring.mixture, config.all_teachers
    unknown = next((name for name in mixture if name not in teachers), None)
    if unknown is not None:
        return (
            f"scoring.mixture must name teachers, got {unknown}; there are: "
            f"{', '.join(teachers)} (the section teacher is called teacher)"
        )
    idle = [name for name in teachers if name not in mixture and name != config.user_teacher]
    if idle:
        return (
            f"scoring.mixture must give every teacher a weight, got none for {idle[0]}, whose "
            "servers would wait for nothing; give it one, or leave that teacher out"
        )
    return None


def _beside(config: ConfigTree) -> str | None:
    several = sum(weight > 0 for weight in config.scoring.mixture.values()) > 1
    if several and not may_mix(config):
        return f"support.type must not be teacher_topk with scoring.mixture: {NO_TOPK}"
    if several and config.metrics.health_every:
        return (
            "metrics.health_every must be 0 with scoring.mixture, because it asks one teacher for "
            f"its likeliest ids, got {config.metrics.health_every}"
        )
    if several and config.metrics.leak_every:
        return (
            "metrics.leak_every must be 0 with scoring.mixture, because it asks one teacher for "
            f"its likeliest ids, got {config.metrics.leak_every}"
        )
    return None
