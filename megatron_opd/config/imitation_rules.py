"""Checks what learning the teacher's own answers (sft_on_teacher) does not go together with."""

from __future__ import annotations

from typing import Any

from megatron_opd.config.tree import ConfigTree, key_of_teacher


def imitation_problem(config: ConfigTree) -> str | None:
    """Return why the run cannot learn what its teachers write, or None."""
    if config.estimator.imitation is None:
        return None
    for name, found, wanted, why in _needs(config):
        if found != wanted:
            return (
                f"{name} must be {_text(wanted)} with objective.type sft_on_teacher, {why}, got "
                f"{_text(found)}; leave it out"
            )
    return None


def _needs(config: ConfigTree) -> list[tuple[str, Any, Any, str]]:
    """Return (key, value, what it must be, why)."""
    sources = [
        (
            f"{key_of_teacher(name)}.source.type",
            section.source.type,
            "checkpoint",
            "because the student would learn its own text",
        )
        for name, section in config.all_teachers.items()
    ]
    return [
        *sources,
        (
            "scoring.alignment",
            None if config.scoring.alignment is None else "an alignment",
            None,
            "because the ids that a teacher of another tokenizer writes are not the student's",
        ),
        (
            "environment",
            None if config.environment is None else config.environment.type,
            None,
            "whose teacher answers a prompt once",
        ),
        (
            "workers.count",
            config.workers.count,
            0,
            "because the controller asks the teacher for its answers",
        ),
        (
            "sites.members",
            sorted(config.sites.members),
            [],
            "because sites sample with the student alone",
        ),
        (
            "selection.groups.type",
            config.selection.groups.type,
            "all",
            "whose answers have no reward to compare",
        ),
        (
            "data.curriculum",
            None if config.data.curriculum is None else "a curriculum",
            None,
            "whose answers tell no pass rate of the student",
        ),
        (
            "learner.routing_replay",
            config.learner.routing_replay,
            "off",
            "because the student's servers have not routed what the teacher wrote",
        ),
    ]


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
