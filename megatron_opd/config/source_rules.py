"""Checks the rules on teachers that follow the student, which involve several sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.config.tree import ConfigTree, key_of_teacher
from megatron_opd.config.wording import listed, shown


def _following(config: ConfigTree) -> dict[str, TeacherConfig]:
    """Return the sections of teachers that follow, by key."""
    return {
        key_of_teacher(name): section
        for name, section in config.all_teachers.items()
        if section.source.follows and section.source.student_share is None
    }


def _suits_its_source(config: ConfigTree) -> str | None:
    """Refuse what a teacher that follows does not do, one key after another."""
    for key, section in _following(config).items():
        for name, found, wanted, why in _needs(config, key, section):
            if found != wanted:
                what, got = _text(wanted), _text(found)
                return f"{name} must be {what} with {_named(key, section)}, {why}, got {got}"
    return None


def _needs(config: ConfigTree, key: str, section: TeacherConfig) -> list[tuple[str, Any, Any, str]]:
    """Return (key, value, what it must be, why and what to do)."""
    return [
        (
            f"{key}.model",
            str(section.model),
            str(config.student.model),
            "because its servers begin with the student's first weights",
        ),
        (
            f"{key}.quantization",
            section.quantization,
            None,
            "because it is sent plain weights; leave it out",
        ),
        (
            "weight_sync.type",
            config.weight_sync.type,
            "shards",
            "the transport that reaches more than one role's servers",
        ),
        (
            "sites.members",
            sorted(config.sites.members),
            [],
            "because no weights are sent to teachers at other sites; use source.type checkpoint",
        ),
    ]


def _servers_of_its_own(config: ConfigTree) -> str | None:
    following = _following(config)
    for key, section in following.items():
        for other, theirs in config.served.items():
            shared = sorted(set(section.urls) & set(theirs.urls))
            if shared and other not in (key, "student"):  # rules.py tells of the student's
                return (
                    f"{key}.urls and {other}.urls must name different servers with "
                    f"{_named(key, section)}, which changes their weights, got {shared[0]} "
                    "in both; start servers of its own"
                )
    return None


OF_NO_SERVERS = frozenset({*TeacherConfig.model_fields} - {*ServerConfig.model_fields}) | {"model"}
"""Keys of a teacher that say nothing of its servers."""


def _scored_by_student(config: ConfigTree) -> str | None:
    """Refuse what a teacher does not do that the student's servers score for."""
    for name, section in config.all_teachers.items():
        key = key_of_teacher(name)
        if section.source.student_share is None:
            continue
        said = f"with {key}.source.share, where the student's servers score"
        if section.model != config.student.model:
            return f"{key}.model must be {config.student.model} {said}, got {section.model}"
        for field, info in TeacherConfig.model_fields.items():
            value, default = getattr(section, field), info.get_default(call_default_factory=True)
            if field not in OF_NO_SERVERS and value != default:
                return (
                    f"{key}.{field} must be left out {said}, got {shown(value)}; section student "
                    "says it"
                )
        if config.sites.members:
            return f"sites.members must be empty {said}, got {listed(config.sites.members)}"
        if name == config.user_teacher:
            return (
                f"{key}.source.share must be null for a teacher that plays the user, got "
                f"{section.source.student_share:g}; leave it out: it gets servers of its own"
            )
    return None


def _named(key: str, section: TeacherConfig) -> str:
    return f"{key}.source.type {section.source.type}"


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


SOURCE_RULES: tuple[Callable[[ConfigTree], str | None], ...] = (
    _suits_its_source,
    _servers_of_its_own,
    _scored_by_student,
)
