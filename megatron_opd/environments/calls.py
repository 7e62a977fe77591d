"""Reads tool calls out of sampled turns, and checks them against the tools.

Invariant: a call has a tool's name and arguments that fit its schema, or an error to answer with;
whatever a turn holds, reading it raises nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_opd.config.unique_keys import unique_keys
from megatron_opd.config.wording import line, listed, shown
from megatron_opd.environments.formats import CALLS, OPEN, TEXT, THOUGHT

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

DATA_KEYS = frozenset({"const", "default", "enum", "examples"})
"""Keys of a schema whose values are no schemas."""
Tool = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {name, parameters, ...}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds one call. id: nine letters and digits. error: why it cannot be made; None: it can.

    unread: name and arguments are not all that the turn says.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    unread: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Holds what the student said in one turn, from 0. text: without thought and calls."""

    turn: int
    text: str
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()


class CallReader:
    """Reads turns in one format. Made once: it checks every tool's schema.

    ValueError: a tool has no name, another's name, or a schema that is none.
    """

    def __init__(self, template: Mapping[str, Any], tools: Sequence[Tool]) -> None:
        self._template = _loaded(template)
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._checks: dict[str, Any] = {}
        for tool in tools:
            function: Mapping[str, Any] = tool.get("function", tool)
            name = function.get("name")
            if not isinstance(name, str) or not name or name in self._checks:
                raise ValueError(f"each tool must have a name of its own, got {shown(name)}")
            self._checks[name] = _checker(name, function.get("parameters") or {"type": "object"})

    def read(self, text: str, turn: int, opened: str = "") -> Reply:
        """Return what a turn's text says. opened: what the template has begun the answer with."""
        from transformers.utils.chat_parsing import ResponseParser

        begun = OPEN if opened.rstrip().endswith(OPEN) else ""
        try:
            parser = ResponseParser(self._template, prefix="", tools=self._tools)
            parser.feed(begun + text)
            found, _ = parser.finalize()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            what = f"the call cannot be read: {line(error)}"
            broken = ToolCall(f"call{turn:03d}00", "", {}, what, unread=True)
            return Reply(turn, text, calls=(broken,))
        calls = tuple(
            self._checked(f"call{turn % 1000:03d}{number % 100:02d}", name, arguments)
            for number, (name, arguments) in enumerate(_made(found.get(CALLS, [])))
        )
        return Reply(turn, str(found.get(TEXT, "")), str(found.get(THOUGHT, "")), calls)

    def _checked(self, call: str, name: Any, arguments: Any) -> ToolCall:
        if isinstance(arguments, Unread):
            return ToolCall(call, "", {}, arguments.why, unread=True)
        if not isinstance(name, str) or name not in self._checks:
            known = listed(self._checks)
            what = f"there is no tool {shown(name, 40)}; there is {known}"
            return ToolCall(call, "", {}, what, unread=True)
        if not isinstance(arguments, Mapping):
            what = f"arguments must be an object, got {shown(arguments, 40)}"
            return ToolCall(call, name, {}, what, unread=True)
        wrong = self._checks[name](arguments)
        return ToolCall(call, name, dict(arguments), wrong)  # pyright: ignore[reportUnknownArgumentType]


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for arguments that cannot be read."""

    why: str


def read_json(text: str) -> Any:
    """Return what a JSON text holds, Unread for one that is none. Strict: no NaN, no key twice."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        why = line(error) if isinstance(error, ValueError) else "too many levels"
        return Unread(f"the call must be JSON: {why}")


def _made(calls: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the name and arguments of each call of parsed regions."""
    for call in calls:
        function: Mapping[str, Any] = call["function"]
        held = function["arguments"]
        if function["name"] is not None:
            yield function["name"].strip(), _read(held or "{}")
            continue
        found = _read(held)
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, Mapping):
                given: Any = each.get("arguments", each.get("parameters", {}))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
                yield each.get("name"), _read(given)  # pyright: ignore[reportUnknownMemberType]
            else:
                unread = each if isinstance(each, Unread) else Unread("a call must be an object")
                yield None, unread


def _read(held: Any) -> Any:
    return read_json(held) if isinstance(held, str) else held


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _loaded(template: Mapping[str, Any]) -> ResponseTemplate:
    from megatron_opd.data.without_torch import transformers_for_tokenizers

    transformers_for_tokenizers()
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(template))


def _checker(name: str, schema: Any) -> Any:
    """Return what says why arguments do not fit a schema, or None where they do.

    ValueError: it is no schema of an object, or refers to what is not in it.
    """
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # the drafts themselves; fetches nothing
    from referencing import Resource
    from referencing.jsonschema import DRAFT202012

    if not isinstance(schema, Mapping):
        raise ValueError(f"the parameters of tool {name} must be an object, got {shown(schema)}")
    try:
        validator: Any = validator_for(schema)
        validator.check_schema(schema)
        checks = validator(schema, registry=REGISTRY)
        whole: Any = Resource.from_contents(schema, default_specification=DRAFT202012)
        resolver: Any = REGISTRY.with_resource("", whole).resolver()
        for reference in _references(schema):
            resolver.lookup(reference)
        best_match(checks.iter_errors({}))  # one that refers to itself alone has no end
    except Exception as error:  # noqa: BLE001  it may break what reads it anywhere
        said = line(getattr(error, "message", error))
        raise ValueError(f"the parameters of tool {name} are no JSON schema: {said}") from None

    def wrong(arguments: Any) -> str | None:
        try:
            found: Any = best_match(checks.iter_errors(arguments))
        except Exception as error:  # noqa: BLE001  what was not met before
            return line(f"the arguments cannot be checked: {error}")
        if found is None:
            return None
        where = ".".join(map(str, found.path))
        return line(f"wrong arguments{f' at {where}' if where else ''}: {found.message}")

    return wrong


def _references(schema: Any) -> Iterator[str]:
    """Return what a schema refers to, without parts that have an address of their own."""
    if isinstance(schema, list | tuple):
        for each in schema:  # pyright: ignore[reportUnknownVariableType]
            yield from _references(each)
    if not isinstance(schema, Mapping):
        return
    for key, each in schema.items():  # pyright: ignore[reportUnknownVariableType]
        if key == "$ref" and isinstance(each, str):
            yield each
        elif key not in DATA_KEYS and not (isinstance(each, Mapping) and "$id" in each):
            yield from _references(each)
