"""Finds what a run's configuration sets otherwise than by default, and where runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from megatron_opd.config.digests import flat
from megatron_opd.config.plain_yaml import dump_plain
from megatron_opd.config.schema import Config
from megatron_opd.config.section import Section

REQUIRED = "(required)"
ABSENT = "(none)"
"""Shown for a key that a run's configuration does not have, as of an objective of another type."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds one key: its default, and its value in each run, as text."""

    key: str
    default: str
    values: tuple[str, ...]

    @property
    def differs_between_runs(self) -> bool:
        """Returns whether the runs do not agree in it."""
        return len(set(self.values)) > 1


@dataclass(frozen=True, slots=True)
class Resolved:
    """Holds a run's configuration by dotted key, as text. all: also what is as by default.

    own: keys that are not as by default; None where the defaults are not known, since this version
    does not accept the file. tree: the configuration as nested mappings.
    """

    all: Mapping[str, str]
    defaults: Mapping[str, str]
    own: frozenset[str] | None
    tree: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Returns the configuration as YAML."""
        return dump_plain(dict(self.tree))


def resolve(tree: Mapping[str, Any]) -> Resolved:
    """Compare a resolved configuration with the defaults of its sections."""
    try:
        config = Config.model_validate(tree)
    except ValidationError:
        texts = {key: shown(value) for key, value in flat(tree).items()}
        return Resolved(texts, {}, None, tree)
    found = {key: (shown(value), shown(default)) for key, value, default in _compared("", config)}
    values = {key: value for key, (value, _) in found.items()}
    defaults = {key: default for key, (_, default) in found.items()}
    own = frozenset(key for key, (value, default) in found.items() if value != default)
    return Resolved(values, defaults, own, config.model_dump(mode="json"))


def settings_of(runs: Sequence[Resolved | None]) -> tuple[Setting, ...]:
    """Return the keys that some run sets, or in which runs differ, in the order of the file."""
    known = [run for run in runs if run is not None]
    keys = dict.fromkeys(key for run in known for key in run.all)
    found: list[Setting] = []
    for key in keys:
        default = next((run.defaults[key] for run in known if key in run.defaults), "")
        texts = tuple("" if run is None else run.all.get(key, ABSENT) for run in runs)
        setting = Setting(key, default, texts)
        set_by_some = any(run.own is not None and key in run.own for run in known)
        if set_by_some or setting.differs_between_runs:
            found.append(setting)
    return tuple(found)


def shown(value: Any) -> str:
    """Return a value as one line of text, as in YAML's flow style."""
    if value is PydanticUndefined:
        return REQUIRED
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _compared(
    prefix: str, section: Section, usual: Any = PydanticUndefined
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, default) of a section and of those in it.

    usual: what stands in its place by default, maybe of another type.
    """
    plain = section.model_dump(mode="json")
    bare = _bare(section)
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        default = field.get_default(call_default_factory=True)
        if isinstance(value, Section):
            yield from _compared(f"{key}.", value, default)
            continue
        if isinstance(value, dict) and any(isinstance(each, Section) for each in value.values()):
            for inner, each in cast(dict[str, Section], value).items():
                yield from _compared(f"{key}.{inner}.", each)
            continue
        if name == "type":
            default = getattr(usual, name, default)
        elif bare is not None and not field.is_required():
            default = getattr(bare, name)
        yield key, plain[name], _plain(default)


def _bare(section: Section) -> Section | None:
    """Return the section with what must be given and its type alone; None: it cannot be so bare.

    A type changes what other keys are when they are left out (schedule.type).
    """
    fields = type(section).model_fields
    given = {name: getattr(section, name) for name in fields if fields[name].is_required()}
    if "type" in fields:
        given["type"] = getattr(section, "type")  # noqa: B009
    try:
        return type(section).model_validate(given)
    except ValidationError:
        return None


def _plain(value: Any) -> Any:
    """Return a default as model_dump(mode="json") writes values."""
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | list):
        return [_plain(each) for each in cast(Sequence[Any], value)]
    if isinstance(value, str | int | float | bool | dict | None) or value is PydanticUndefined:
        return cast(Any, value)
    return str(value)
