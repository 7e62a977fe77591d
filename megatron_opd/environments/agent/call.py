"""Reads the body of a chat completion request, and refuses what no turn of a run can do.

Invariant: a call that is read asks for nothing that is not done, but for the settings of sampling
that `ignored` names: a run samples as section rollout says, since that is what is trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_opd.config.unique_keys import unique_keys
from megatron_opd.config.wording import listed, shown
from megatron_opd.data.calls import whole
from megatron_opd.data.chats import ASSISTANT, ROLES, TOOL, Chat, ChatMessage, chat_like
from megatron_opd.data.faults import Unusable
from megatron_opd.data.messages import read_chat
from megatron_opd.data.plain import plain
from megatron_opd.environments.agent.refused import Refused

MODEL = "student"
"""What the student is called."""
MOST_STOPS = 4

_READ = {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stream"}
_READ |= {"stream_options", "stop", "max_tokens", "max_completion_tokens"}
_IGNORED = {"temperature", "top_p", "seed", "reasoning_effort", "verbosity"}
"""Settings of sampling, which are the run's."""
_OF_ACCOUNTS = {"user", "metadata", "store", "service_tier", "safety_identifier"}
_OF_ACCOUNTS |= {"prompt_cache_key", "prompt_cache_retention"}
"""What changes no answer."""
_GRAMMAR = "the student's answers are drawn without a grammar; leave it out, and check the answer"
_DISTRIBUTION = "it would change the distribution that is trained on; leave it out"
_ONLY: Mapping[str, tuple[Sequence[Any], str]] = {
    "n": ((1,), "one answer is sampled a call; call again for another"),
    "tool_choice": (("auto", "none"), _GRAMMAR),
    "parallel_tool_calls": ((True,), _GRAMMAR),
    "response_format": (({"type": "text"},), _GRAMMAR),
    "logit_bias": (({},), _DISTRIBUTION),
    "frequency_penalty": ((0,), _DISTRIBUTION),
    "presence_penalty": ((0,), _DISTRIBUTION),
    "logprobs": ((False,), "log-probs are recorded for the learner; leave it out"),
    "top_logprobs": ((0,), "log-probs are recorded for the learner; leave it out"),
    "modalities": ((["text"],), "the student reads and writes text"),
}
"""Keys that may have some values alone, and why."""
_KEYS: Mapping[str, set[str]] = {
    ASSISTANT: {"tool_calls", "reasoning_content", "reasoning"},
    TOOL: {"tool_call_id"},
}
_EMPTY = {"refusal", "annotations", "audio", "function_call"}
"""What clients send back of an answer that has none of it."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """Holds what one call asks for. chat: with its tools; a tool's messages have its name.

    most_tokens: a limit of its own on the turn, None without. ignored: settings that are the run's.
    """

    chat: Chat
    stop: tuple[str, ...] = ()
    most_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()


def read_call(body: bytes, sampling: Mapping[str, float]) -> AgentCall:
    """Return what a request asks for. sampling: the run's own settings, by their names.

    Raises Refused.
    """
    asked = {name: value for name, value in _object(body).items() if value is not None}
    if asked.get("model") != MODEL:
        what = f"there is no model {shown(asked.get('model'), 40)}; the run serves {MODEL}"
        raise Refused(what, status=404, code="model_not_found", key="model")
    for name, value in asked.items():
        if name in _ONLY:
            _check(name, value)
        elif name not in _READ | _IGNORED | _OF_ACCOUNTS:
            raise Refused(f"{shown(name, 40)} is not served; leave it out", key="request")
    tools = [] if asked.get("tool_choice") == "none" else _tools(asked.get("tools", []))
    options = asked.get("stream_options", {})
    if not isinstance(options, dict):
        raise Refused("stream_options must be an object", key="stream_options")
    return AgentCall(
        _chat(asked.get("messages"), tools),
        _stops(asked.get("stop", [])),
        _most(asked),
        _flag(asked.get("stream", False), "stream"),
        _flag(options.get("include_usage") or False, "stream_options"),
        tuple(sorted(n for n in _IGNORED & set(asked) if asked[n] != sampling.get(n))),
    )


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, without keys that are given twice or numbers like NaN."""
    try:
        found = plain(
            json.loads(
                body, object_pairs_hook=unique_keys, parse_constant=_number, parse_float=_number
            ),
            "the body",
        )
        whole(found, "the body")
    except Unusable as fault:
        raise Refused(fault.what) from None
    except (ValueError, RecursionError) as error:
        why = "too many levels" if isinstance(error, RecursionError) else error
        raise Refused(f"the body must be JSON: {why}") from None
    if not isinstance(found, dict):
        raise Refused(f"the body must be an object, got {type(found).__name__}")
    return found  # pyright: ignore[reportUnknownVariableType]


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text, 40)} is no finite number")
    return number


def _check(name: str, value: Any) -> None:
    allowed, why = _ONLY[name]
    if not any(type(value) is type(each) and value == each for each in allowed):
        if isinstance(value, float) and value in allowed and not isinstance(allowed[0], bool):
            return  # 0.0 for 0
        wanted = " or ".join(json.dumps(each) for each in allowed)
        raise Refused(f"{name} must be {wanted}, got {shown(value, 60)}: {why}", key=name)


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise Refused(f"{key} must be true or false, got {shown(value, 40)}", key=key)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    texts = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not texts or len(stops) > MOST_STOPS:
        what = f"stop must be a text or at most {MOST_STOPS} of them, got {shown(value, 60)}"
        raise Refused(what, key="stop")
    return tuple(stops)


def _most(asked: Mapping[str, Any]) -> int | None:
    limits: list[int] = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = asked.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Refused(
                f"{name} must be a whole number above 0, got {shown(value, 40)}", key=name
            )
        limits.append(value)
    return min(limits, default=None)


def _tools(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Refused(f"tools must be a list of objects, got {shown(value, 60)}", key="tools")
    return [_tool(tool) for tool in value]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: Any = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        what = f"a tool must have type function and a function, got {shown(tool, 60)}"
        raise Refused(what, key="tools")
    if function.get("strict"):
        name = shown(function.get("name"), 40)
        raise Refused(f"tool {name} must not be strict: {_GRAMMAR}", key="tools")
    return {**tool, "function": {n: each for n, each in function.items() if n != "strict"}}


def _chat(value: Any, tools: list[dict[str, Any]]) -> Chat:
    if not isinstance(value, list):
        raise Refused(f"messages must be a list, got {shown(value, 60)}", key="messages")
    messages = [_message(number, each) for number, each in enumerate(value, start=1)]
    try:
        chat = read_chat({"messages": messages, "tools": tools}, "messages", "tools")
    except Unusable as fault:
        raise Refused(fault.what, key="messages") from None
    assert not isinstance(chat, str), "a list is read as messages"
    if chat[-1].role == ASSISTANT:
        what = "messages must end with the user's or a tool's, which the student answers"
        raise Refused(what, key="messages")
    return _named(chat)


def _message(number: int, value: Any) -> dict[str, Any]:
    """Return a message without what says nothing."""
    where = f"message {number}"
    if not isinstance(value, dict):
        raise Refused(f"{where} must be an object, got {shown(value, 40)}", key="messages")
    message: dict[str, Any] = {name: each for name, each in value.items() if each is not None}  # pyright: ignore[reportUnknownVariableType]
    role = message.get("role")
    if role not in ROLES:
        what = f"{where} has the role {shown(role, 40)}; roles are {', '.join(ROLES)}"
        raise Refused(what, key="messages")
    if role == ASSISTANT:
        if not message.get("content"):
            message = {**message, "content": ""}
        message = {n: each for n, each in message.items() if each or n not in _EMPTY}
    known = {"role", "content", "name"} | _KEYS.get(role, set())
    strange = sorted(set(message) - known)
    if strange:
        what = f"{where} has {shown(strange[0], 40)}, which is not served; it may have"
        raise Refused(f"{what} {listed(known)}", key="messages")
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if not isinstance(message.get(name, ""), str):
            raise Refused(f"{name} of {where} must be a text", key="messages")
    if not isinstance(message.get("tool_calls", []), list):
        raise Refused(f"tool_calls of {where} must be a list", key="messages")
    return message


def _named(chat: Chat) -> Chat:
    """Return a chat in which a tool's results have its name, as templates write it.

    OpenAI's have the id of a call alone.
    """
    names: dict[str, str] = {}
    found: list[ChatMessage] = []
    for message in chat:
        others = message.others
        for call in others.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call.get("function", call)["name"]
        name = names.get(others.get("tool_call_id", ""))
        if message.role == TOOL and name is not None and "name" not in others:
            message = message._replace(others={"name": name, **others})
        found.append(message)
    return chat_like(chat, found)
