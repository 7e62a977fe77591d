"""Turns what pydantic says of an invalid tree into one line that a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_opd.config.import_path import BY_PATH
from megatron_opd.config.section import Section
from megatron_opd.config.wording import line, shown

RENAMED = {
    "run.updates": "run.max_steps",
    "learner.mini_batches": "learner.num_mini_batches",
    "learner.tokens_per_microbatch": "learner.max_tokens_per_microbatch",
    "buffer.max_staleness": "schedule.max_staleness",
    "buffer.hold_batches": "schedule.hold_batches",
    "weight_sync.verify_first": "weight_sync.verify_every",
}
"""{earlier name of a key: its name now}."""
RENAMED_VALUES = {
    ("reduction", "token"): "token_mean",
    ("reduction", "sequence"): "sequence_mean",
    ("reduction", "fixed"): "fixed_length",
}
"""{(section, earlier `type`): its `type` now}."""


def first_problem(schema: type[Section], error: ValidationError) -> str:
    """Return the most useful problem: unknown keys first, as a typo makes another "missing"."""
    problem = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    keys, section = _resolve(schema, problem["loc"], problem["type"] == "extra_forbidden")
    key = line(".".join(keys))
    if problem["type"] == "extra_forbidden":
        if key in RENAMED:
            return f"unknown key {shown(key)}: it is now {RENAMED[key]!r}"
        return f"unknown key {shown(key)}{_nearest_key(section, keys)}"
    if problem["type"] == "missing":
        return f"missing key {shown(key)}"
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_type(key, section, problem)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[:1].lower()}{message[1:]}, got {shown(problem['input'])}"


def variants(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a key may hold: one, or one per `type`; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = [variant for part in get_args(annotation) for variant in variants(part)]
    return list(dict.fromkeys(found))


def type_of(section: type[BaseModel]) -> str | None:
    """Return the `type` of a variant, or None for a section that has only one form."""
    field = section.model_fields.get("type")
    if field is None:
        return None
    return BY_PATH if field.is_required() else str(field.default)


def _resolve(
    schema: type[BaseModel], location: Sequence[int | str], names_unknown: bool
) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the keys as the user wrote them, and the sections that the last but one may be.

    pydantic puts the chosen variant's `type` into a location; the user never wrote it there.
    """
    keys: list[str] = []
    here: list[type[BaseModel]] = [schema]
    parts: Iterator[tuple[int, int | str]] = iter(enumerate(location))
    for index, part in parts:
        last = index == len(location) - 1
        tagged = [section for section in here if type_of(section) == part]
        if keys and tagged and len(here) > 1:
            here = tagged
            continue
        keys.append(str(part))
        if last and names_unknown:
            break
        fields = [section.model_fields[part] for section in here if part in section.model_fields]
        if fields:
            here = [v for field in fields for v in variants(field.annotation)]
    return keys, here


def _nearest_key(sections: list[type[BaseModel]], keys: list[str]) -> str:
    known = list(dict.fromkeys(name for section in sections for name in section.model_fields))
    if not known:
        return ""
    close = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.0)
    hint = f"; did you mean {shown('.'.join([*keys[:-1], close[0]]))}?"
    named = type_of(sections[0])
    others = ", ".join(name for name in known if name != "type")
    return hint if named is None else f" of type {named}, whose keys are: {others or 'none'}"


def _wrong_type(key: str, sections: list[type[BaseModel]], problem: ErrorDetails) -> str:
    names = [name for section in sections if (name := type_of(section)) is not None]
    given: Any = problem["input"]
    if not isinstance(given, dict):
        return f"{key} must be a mapping with a `type`, got {shown(given)}"
    chosen = str(given.get("type"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    renamed = RENAMED_VALUES.get((key, chosen))
    if renamed is not None:
        return f"{key}.type {shown(chosen)} is now {renamed!r}"
    close = difflib.get_close_matches(chosen, names, n=1, cutoff=0.0)
    return (
        f"{key}.type must be one of {', '.join(names)}, got {shown(chosen)}; "
        f"did you mean {close[0]!r}?"
    )
