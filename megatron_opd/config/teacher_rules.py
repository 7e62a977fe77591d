"""Checks what teachers are to read against the sections that say what students read."""

from __future__ import annotations

from collections.abc import Callable

from megatron_opd.config.environment import AgentConfig
from megatron_opd.config.tree import ConfigTree, key_of_teacher
from megatron_opd.config.wording import shown


def _teacher_prompt(config: ConfigTree) -> str | None:
    key = config.data.teacher_prompt_key
    if key is None:
        return None
    if not config.estimator.asks_teacher:
        return (
            f"data.teacher_prompt_key {key} has no effect: objective.type {config.objective.type} "
            "reads no teacher; leave it null"
        )
    if config.environment is not None:
        return (
            f"data.teacher_prompt_key must be null with an environment, which says the prompts of "
            f"its trajectories, got {key}; leave one of them out"
        )
    return None


def otherwise_played(config: ConfigTree) -> str | None:
    """Return what plays trajectories that a teacher cannot read in a rendering of its own."""
    environment = config.environment
    if environment is None:
        return None
    if isinstance(environment, AgentConfig):
        return "environment.type agent"
    if environment.history != "append":
        return f"environment.history {environment.history}"
    if config.workers.count:
        return "an environment on data workers (workers.count)"
    return "an environment at sites (sites.members)" if config.sites.members else None


def _own_reading(config: ConfigTree) -> str | None:
    for name, section in config.all_teachers.items():
        reading, role = section.own_reading, key_of_teacher(name)
        if not reading:
            continue
        key, value = next(iter(reading.items()))
        got = f"got {shown(str(value) if key == 'chat_template' else value)}"
        if not config.estimator.asks_teacher:
            return (
                f"{role}.{key} has no effect: objective.type {config.objective.type} reads no "
                f"teacher, {got}; leave it null"
            )
        beside = otherwise_played(config)
        if beside is not None:
            return (
                f"{role}.{key} must be null with {beside}, whose words a teacher reads as the "
                f"student does, {got}; leave one of them out"
            )
        if config.scoring.mixture:
            return (
                f"{role}.{key} must be null with scoring.mixture, whose teachers read the same "
                f"prompts, {got}; leave one of them out"
            )
        template = section.chat_template
        if not (config.data.chat_template if template is None else template):
            needing = [key for key in reading if key != "chat_template"]
            if needing:
                return (
                    f"{role}.{needing[0]} needs {role}.chat_template: true or a file, or one of "
                    f"data.chat_template, got {shown(reading[needing[0]])} without it; set "
                    f"{role}.chat_template: true or leave it out"
                )
    return None


def _leak(config: ConfigTree) -> str | None:
    every = config.metrics.leak_every
    if every == 0:
        return None
    if not config.estimator.reads_teacher:
        return (
            f"metrics.leak_every must be 0 with objective.type {config.objective.type}, which "
            f"reads no scores of a teacher, got {every}"
        )
    if config.data.teacher_prompt_key is None:
        return (
            "metrics.leak_every needs data.teacher_prompt_key, the column whose hints it measures, "
            f"got {every} without it; set it or leave this out"
        )
    for name, section in config.all_teachers.items():
        if section.own_reading:
            key = f"{key_of_teacher(name)}.{next(iter(section.own_reading))}"
            return (
                f"metrics.leak_every must be 0 with {key}, which changes more than hints do, got "
                f"{every}; leave one of them out"
            )
        if config.schedule.time_shared and section.source.student_share is not None:
            return (
                f"metrics.leak_every must be 0 with schedule.time_shared and "
                f"{key_of_teacher(name)}.source.share, where the servers that score have no memory "
                f"while the learner works, got {every}"
            )
    return None


Rule = Callable[[ConfigTree], str | None]
TEACHER_RULES: tuple[Rule, ...] = (_teacher_prompt, _own_reading, _leak)
