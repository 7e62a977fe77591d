"""Checks what teachers whose servers lack the plugin (teacher.api) cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.config.teacher_api import SCORABLE
from megatron_opd.config.tree import ConfigTree, key_of_teacher


def _foreign(config: ConfigTree) -> dict[str, TeacherConfig]:
    """Return the sections of teachers whose servers are not ours, by key."""
    return {
        key_of_teacher(name): section
        for name, section in config.all_teachers.items()
        if not section.speaks_bridge
    }


def _scores_the_support(config: ConfigTree) -> str | None:
    if not config.estimator.reads_teacher:
        return None
    support = config.estimator.support.type
    for key, section in _foreign(config).items():
        supports = SCORABLE[section.api].supports
        if supports == ():
            return (
                f"{key}.api must not be {section.api} with objective.type "
                f"{config.objective.type}, which reads log-probs that such a server does not give; "
                "use objective.type sft_on_teacher alone, or another api"
            )
        if supports is not None and support not in supports:
            return (
                f"support.type must be {' or '.join(supports)} with {key}.api {section.api}, which "
                f"cannot score other ids at each position, got {support}; set support.type: path, "
                f"or serve the plugin ({key}.api: bridge)"
            )
    return None


def _goes_with(config: ConfigTree) -> str | None:
    """Refuse what needs the plugin, one key after another."""
    for key, section in _foreign(config).items():
        for name, found, wanted, why in _needs(config, key, section):
            if found != wanted:
                return (
                    f"{name} must be {_text(wanted)} with {key}.api {section.api}, {why}, got "
                    f"{_text(found)}"
                )
    return None


def _needs(config: ConfigTree, key: str, section: TeacherConfig) -> list[tuple[str, Any, Any, str]]:
    """Return (key, value, what it must be, why and what to do)."""
    scored = config.estimator.reads_teacher
    plays_user = config.user_teacher is not None and key_of_teacher(config.user_teacher) == key
    return [
        (
            f"{key}.source.type",
            section.source.type,
            "checkpoint",
            "whose servers are sent no weights; leave it out",
        ),
        (
            "scoring.temperature",
            config.scoring.temperature if scored else 1.0,
            1.0,
            "which scores prompts at temperature 1 alone; leave it out, or serve the plugin",
        ),
        (
            "metrics.health_every",
            config.metrics.health_every if scored else 0,
            0,
            "which draws no ids of its own; leave it out",
        ),
        (
            "metrics.leak_every",
            config.metrics.leak_every if scored else 0,
            0,
            "which draws no ids of its own; leave it out",
        ),
        (
            "scoring.alignment",
            None if config.scoring.alignment is None or not scored else "an alignment",
            None,
            "which does not score the ids of another tokenizer's reading; leave it out",
        ),
        (
            "workers.count",
            config.workers.count,
            0,
            "whose replies only the controller reads; leave it out",
        ),
        (
            "sites.members",
            ", ".join(sorted(config.sites.members)) or "empty",
            "empty",
            "which far sites do not ask; leave it out",
        ),
        (
            "environment.teacher",
            "this teacher" if plays_user else "another one",
            "another one",
            "which plays no user; serve the plugin, or name another teacher",
        ),
        (
            "run.deterministic",
            config.run.deterministic,
            False,
            "whose servers cannot be told to be; leave it out",
        ),
    ]


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_elsewhere(config: ConfigTree) -> str | None:
    for key, section in _foreign(config).items():
        if not section.urls:
            return (
                f"{key}.urls must name the servers with {key}.api {section.api}, because those "
                f"that are started here have the plugin, got none; set {key}.urls, or leave "
                f"{key}.api out"
            )
    for name, section in config.all_teachers.items():
        key = key_of_teacher(name)
        for own in ("served_name", "cost_per_million_tokens"):
            if section.speaks_bridge and getattr(section, own) is not None:
                return (
                    f"{key}.{own} has no effect with {key}.api bridge, got "
                    f"{getattr(section, own)}; leave it out"
                )
    return None


API_RULES: tuple[Callable[[ConfigTree], str | None], ...] = (
    _is_elsewhere,
    _scores_the_support,
    _goes_with,
)
