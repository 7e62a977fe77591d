"""What an environment returns from start and step -> what the run is told, over its process's wire.

Two ways in: values of any Python type, as a class of a user's returns them, and the bytes of its
process, which its code may write itself.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import UserDict
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from checks.fuzz.engine import Target
from checks.fuzz.mutations import TEXTS, damaged_bytes, damaged_tree, hostile_value, msgpack_bytes
from megatron_opd.data.chats import Chat, ChatMessage, tools_of
from megatron_opd.data.verifiers.messages import with_length
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.guarded import EnvironmentLimits, GuardedEnvironment
from megatron_opd.environments.host import answer
from megatron_opd.environments.hosted import _HostedEnvironment
from megatron_opd.environments.protocol import EnvironmentRow, Said, TrajectoryEnd
from megatron_opd.environments.wire import StartAsk, StartSaid, StepAsk, StepSaid, framed
from megatron_opd.environments.words import Answered
from megatron_opd.records.drops import ENVIRONMENT_REASONS

LIMITS = EnvironmentLimits(timeout_s=60.0, message_bytes=3000)
ROW, REPLY = EnvironmentRow("asked"), Reply(0, "said")
ROLES = {"start": ("system", "developer", "user", "assistant", "tool"), "step": ("user", "tool")}
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
USER = {"role": "user", "content": "Again."}
TOOL = {"role": "tool", "content": "3", "name": "f", "tool_call_id": "call00000"}
MESSAGES: list[Any] = [
    "Too low.",
    [USER],
    [TOOL, TOOL, USER],
    [{"role": "system", "content": "S"}, USER],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOOL],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "é🙂" * 700,
]
TOOLS: list[Any] = [
    (),
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
]


class Given(NamedTuple):
    """An input. said: returned by `asked`, start or step. body: or written by the process."""

    asked: str
    said: Any = None
    tools: Any = ()
    body: bytes | None = None

    def __repr__(self) -> str:
        try:
            return f"{self.asked}: {(self.said, self.tools) if self.body is None else self.body!r}"
        except Exception:  # noqa: BLE001  of a value that cannot be printed
            return f"{self.asked}: a {type(self.said).__name__} that cannot be printed"


class Refused(ValueError):
    """The trajectory is dropped, with a reason that is counted."""


class Lying(Mapping[str, Any]):
    """A mapping that raises where it is read."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("two\nlines")

    def __len__(self) -> int:
        return 1


class Unprintable:
    """A value that cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __str__(self) -> str:
        raise RuntimeError("no words")


class OwnText(str):
    """A text of a class of its own."""


def endless() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = [USER]
    found.append(found)
    return found


def odd(rng: Random) -> Any:
    """A value that no JSON has."""
    return rng.choice(
        (
            *(b"x", {1}, object(), Ellipsis, int, Unprintable(), Lying(), endless(), len),
            *(Decimal("0.5"), Decimal("NaN"), Fraction(1, 3), 1 + 2j, range(3), 10**400),
            *(np.float64(0.5), np.float32("nan"), np.int64(3), np.array([1.0]), np.bool_(True)),
            *(UserDict(USER), SimpleNamespace(**USER), OwnText("own"), "\ud83d\ude42", "\ud83d"),
            *(TrajectoryEnd, Said, Said("a"), TrajectoryEnd(1.0), memoryview(b"x"), iter([USER])),
        )
    )


def rewards(rng: Random) -> Any:
    """A reward, mostly an odd one."""
    plain = (None, 0.0, 1.0, 1, True, -2.5, 1e308, -0.0)
    return rng.choice((rng.choice(plain), hostile_value(rng), odd(rng)))


TREES = damaged_tree(MESSAGES)


def messages(rng: Random) -> Any:
    """Messages, whole, damaged or of another kind."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(MESSAGES)
    if kind < 0.75:
        found = TREES(rng)
        return tuple(found) if isinstance(found, list) and rng.random() < 0.3 else found
    if kind < 0.85:
        return [rng.choice((USER, TOOL)) | {rng.choice(("content", "name", *TEXTS)): odd(rng)}]
    return odd(rng) if kind < 0.95 else "x" * rng.randint(2990, 3010)


def returned(rng: Random) -> Given:
    """What a class of a user's returns."""
    asked = rng.choice(("start", "step", "step"))
    kind = rng.random()
    tools = rng.choice((rng.choice(TOOLS), rng.choice(TOOLS), damaged_tree(TOOLS[1:])(rng)))
    if asked == "start" or kind < 0.4:
        return Given(asked, messages(rng), tools)
    if kind < 0.7:
        return Given(asked, Said(messages(rng), rewards(rng)))
    return Given(asked, TrajectoryEnd(rewards(rng)))


@cache
def bodies() -> list[Any]:
    """What its process says where all is well, as trees of msgpack, and what it may say instead."""
    user, tool = ChatMessage("user", "Again."), ChatMessage("tool", "3", {"name": "f"})
    said = [
        StartSaid((user,), TOOLS[1]),
        StartSaid((ChatMessage("system", "S"), user), ()),
        StepSaid(Answered((user,), 0.5, ended=False)),
        StepSaid(Answered((tool, user), None, ended=False)),
        StepSaid(Answered((), 1.0, ended=True)),
    ]
    trees = [msgspec.msgpack.decode(framed(each)[4:]) for each in said]
    return [*trees, {"type": "AnswerFailed", "reason": "environment_failed", "detail": "why"}]


def written(rng: Random) -> Given:
    """What its process writes."""
    asked, kind = rng.choice(("start", "step")), rng.random()
    if kind < 0.05:
        tree = {"type": "StartSaid", "messages": [["user", "a", {"x": 7}]], "tools": []}
        deep = b"\x91" * rng.choice((40, 900, 5000, 100_000)) + b"\x07"
        body = msgpack_bytes(tree).replace(b"\x07", deep)
    elif kind < 0.75:
        body = msgpack_bytes(damaged_tree(bodies())(rng))
    else:
        body = damaged_bytes([msgpack_bytes(each) for each in bodies()])(rng)
    return Given(asked, body=body)


def make(rng: Random) -> Given:
    """Either way in."""
    return (returned if rng.random() < 0.6 else written)(rng)


async def heard(given: Given) -> Chat | Answered:
    """What the run is told. Raises EnvironmentFailed."""
    body = given.body
    if body is None:

        class Own:
            tools = given.tools

            async def start(self, row: Any) -> Any:
                return given.said

            async def step(self, reply: Any) -> Any:
                return given.said

        ask = StartAsk(ROW) if given.asked == "start" else StepAsk(REPLY)
        body = await answer(GuardedEnvironment(Own(), LIMITS), ask)
    else:
        body = with_length(body)
    reader = asyncio.StreamReader()
    reader.feed_data(body)
    reader.feed_eof()

    async def drain() -> None:
        pass

    writer: Any = SimpleNamespace(write=len, drain=drain)
    hosted = _HostedEnvironment(reader, writer, LIMITS)
    if given.asked == "start":
        return await hosted.start(ROW)
    return await hosted.step(REPLY)


def call(given: Given) -> Chat | Answered:
    """Let it be said, and heard."""
    try:
        return asyncio.run(heard(given))
    except EnvironmentFailed as failed:
        if failed.reason not in ENVIRONMENT_REASONS:
            raise KeyError(failed.reason) from None  # which would not be counted
        raise Refused(f"{failed.reason}: {failed.detail}") from None


def oracle(given: Given, found: Chat | Answered) -> str | None:
    """A conversation that a template can be given, a finite reward, and what was said."""
    answered = found if isinstance(found, Answered) else None
    if (answered is None) is not (given.asked == "start"):
        return "an answer to another question"
    if answered is not None:
        reward = answered.reward
        if reward is not None and not (type(reward) is float and math.isfinite(reward)):
            return "a reward that is no finite number"
        if answered.ended is bool(answered.messages):
            return "an end that says something, or an answer that says nothing"
    chat = answered.messages if answered is not None else found
    assert isinstance(chat, tuple)
    why = _chat_fault(chat, given) if chat or answered is None else None
    if why is None and given.body is None:
        why = _difference(given, chat, answered)
    return why


def _chat_fault(chat: Chat, given: Given) -> str | None:
    if not chat:
        return "a conversation without messages"
    for number, message in enumerate(chat):
        if message.role not in ROLES[given.asked]:
            return f"a message of the {message.role!r}"
        if message.role in ("system", "developer") and number > 1:
            return "a system message in the middle"
        if not isinstance(message.content, str) or {"role"} & set(message.others):
            return "a message whose content is no text, or that has two roles"
    if given.asked == "start" and chat[-1].role in ("assistant", "system", "developer"):
        return "a beginning that the student does not answer"
    if given.body is None:  # else the frame is limited, which holds names of fields too
        texts = sum(len(message.content.encode()) for message in chat)
        if texts > LIMITS.message_bytes:
            return "more than the limit"
    try:
        json.dumps([chat, tools_of(chat)], ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return "what no template is given: no JSON, or halves of characters"
    return None


def _number(meant: Any) -> float:
    """Return a reward as a number, numpy's too; NaN, which equals nothing, for what is none."""
    held = np.asarray(meant)
    return float(held.item()) if held.size == 1 else math.nan


def _difference(given: Given, chat: Chat, answered: Answered | None) -> str | None:
    """Return in what way this is not what was said."""
    said = given.said
    ended = isinstance(said, TrajectoryEnd)
    if answered is not None:
        meant = said.reward if isinstance(said, Said | TrajectoryEnd) else None
        if not (answered.reward is None if meant is None else answered.reward == _number(meant)):
            return "another reward"
        if answered.ended is not ended:
            return "another end"
    if ended:
        return None
    words = said.messages if isinstance(said, Said) else said
    if isinstance(words, str):
        words = [{"role": "user", "content": words}]
    if len(words) != len(chat):
        return "more or fewer messages"
    for one, message in zip(words, chat, strict=True):
        role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
        parts = content if isinstance(content, list | tuple) else [content]
        texts = [part["text"] if isinstance(part, Mapping) else part or "" for part in parts]
        plain = "".join(texts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if "from" not in one and role != message.role:
            return "another role"
        if plain != message.content:
            return "another text"
    return None


TARGET = Target("environment_answers", make, call, (Refused,), oracle, share=2)
