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

Tool = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {name, parameters, ...}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds one call. id: nine letters and digits. error: why it cannot be made; None: it can."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


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
            broken = ToolCall(
                f"call{turn:03d}00", "", {}, f"the call cannot be read: {line(error)}"
            )
            return Reply(turn, text, calls=(broken,))
        calls = tuple(
            self._checked(f"call{turn % 1000:03d}{number % 100:02d}", name, arguments)
            for number, (name, arguments) in enumerate(_made(found.get(CALLS, [])))
        )
        return Reply(turn, str(found.get(TEXT, "")), str(found.get(THOUGHT, "")), calls)

    def _checked(self, call: str, name: Any, arguments: Any) -> ToolCall:
        if isinstance(arguments, Unread):
            return ToolCall(call, "", {}, arguments.why)
        if not isinstance(name, str) or name not in self._checks:
            known = listed(self._checks)
            return ToolCall(call, "", {}, f"there is no tool {shown(name, 40)}; there is {known}")
        if not isinstance(arguments, Mapping):
            return ToolCall(
                call, name, {}, f"arguments must be an object, got {shown(arguments, 40)}"
            )
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
    """Return what says why arguments do not fit a schema, or None where they do."""
    from jsonschema import SchemaError
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # the drafts themselves; fetches nothing

    validator: Any = validator_for(schema)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(
            f"the parameters of tool {name} are no JSON schema: {error.message}"
        ) from None
    checks = validator(schema, registry=REGISTRY)

    def wrong(arguments: Any) -> str | None:
        found: Any = best_match(checks.iter_errors(arguments))
        if found is None:
            return None
        where = ".".join(map(str, found.path))
        return line(f"wrong arguments{f' at {where}' if where else ''}: {found.message}")

    return wrong
