"""Reads the tools of a chat and the calls of them, which templates write into prompts.

Invariant: a template is given what its row holds. Only the arguments of a call have two forms, a
mapping and its JSON text: the mapping is tried first, as SGLang does before it renders, since
templates write it as JSON; a template that fails on it, or prints it as Python does, gets the text.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_opd.config.unique_keys import unique_keys
from megatron_opd.config.wording import shown
from megatron_opd.data.faults import Unusable
from megatron_opd.data.plain import unicode

ARGUMENTS = "arguments"
Given = dict[str, Any]


def read_tools(value: Any, key: str) -> Sequence[Given]:
    """Return the tools of a row: a list of schemas, or their JSON text. Raises Unusable."""
    found = _listed(value, f"{key!r}")
    for number, tool in enumerate(found):
        found[number] = _mapping(tool, f"tool {number + 1} of {key!r}")
        if not found[number]:
            raise Unusable("bad_chat", f"tool {number + 1} of {key!r} is empty")
    whole(found, repr(key))
    return tuple(found)


def read_calls(value: Any, where: str) -> list[Given]:
    """Return the calls of a message: a list of mappings, or its JSON text. Raises Unusable."""
    calls: list[Given] = []
    for number, call in enumerate(_listed(value, f"tool_calls of {where}"), start=1):
        at = f"call {number} of {where}"
        made = _mapping(call, at)
        function = made.get("function", made)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable("bad_chat", f"{at} must have the name of a function, got {shown(call)}")
        as_mapping(function.get(ARGUMENTS), at)
        calls.append(made)
    whole(calls, f"tool_calls of {where}")
    return calls


def as_mapping(arguments: Any, where: str) -> Any:
    """Return the arguments of a call as a mapping. Raises Unusable for what is none."""
    if isinstance(arguments, str):
        return _loaded(arguments, f"the arguments of {where}") if arguments.strip() else {}
    if arguments is not None and not isinstance(arguments, dict):
        kind = type(arguments).__name__
        what = f"the arguments of {where} must be a mapping, or its JSON text, got {kind}"
        raise Unusable("wrong_type", what)
    return arguments  # pyright: ignore[reportUnknownVariableType]


class WatchedArguments(dict[str, Any]):
    """Holds the arguments of a call, and lists in `prints` what is printed of them as Python does.

    Copies share the list: transformers copies a chat whose last message it continues.
    """

    def __init__(self, arguments: Mapping[str, Any], prints: list[str]) -> None:
        super().__init__(arguments)
        self.prints = prints

    def __repr__(self) -> str:
        self.prints.append(found := super().__repr__())
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedArguments:
        return WatchedArguments(copy.deepcopy(dict(self), memo), self.prints)


def with_arguments(message: Given, prints: list[str] | None = None) -> Given:
    """Return a message whose calls have their arguments as JSON text, or as mappings.

    prints: make them mappings, and list here what a template prints of them as Python does.
    """
    if "tool_calls" not in message:
        return message
    message = copy.deepcopy(message)
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get(ARGUMENTS)
        if prints is None and isinstance(arguments, dict):
            function[ARGUMENTS] = json.dumps(arguments, ensure_ascii=False)
        elif prints is not None and isinstance(arguments, dict | str):
            function[ARGUMENTS] = WatchedArguments(as_mapping(arguments, "a call"), prints)
    return message


def whole(value: Any, where: str) -> None:
    """Check that every text inside is Unicode, and everything else what JSON has too."""
    if isinstance(value, str):
        unicode(value, where)
    elif isinstance(value, Mapping):
        for name, each in value.items():  # pyright: ignore[reportUnknownVariableType]
            whole(name, where)
            whole(each, where)
    elif isinstance(value, list | tuple):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            whole(each, where)
    elif value is not None and not isinstance(value, int | float):
        raise Unusable("wrong_type", f"{where} holds {type(value).__name__}, which no template has")


def _listed(value: Any, what: str) -> list[Any]:
    if isinstance(value, str) and value.strip():
        value = _parsed(value, what)
        value = [value] if isinstance(value, dict) else value
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return []
    if not isinstance(value, list):
        kind = type(value).__name__
        raise Unusable("wrong_type", f"{what} must be a list of mappings, got {kind}")
    return list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _mapping(value: Any, what: str) -> Given:
    if isinstance(value, str):
        return _loaded(value, what)
    if not isinstance(value, dict):
        raise Unusable("wrong_type", f"{what} must be a mapping, got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _loaded(text: str, what: str) -> Given:
    found = _parsed(text, what)
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise Unusable("wrong_type", f"{what} must be a mapping as JSON text, got {kind}")
    return found  # pyright: ignore[reportUnknownVariableType]


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        raise Unusable("bad_chat", f"{what} is text that is no JSON: {shown(text, 60)}") from None
