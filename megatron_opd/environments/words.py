"""Reads what an environment says, whatever it is.

Invariant: what is read is a chat of whole texts that a chat template can be given, within a limit
of bytes, and a finite reward; everything else is EnvironmentFailed with a reason to count, also a
value that raises where it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_opd.config.wording import described, line, shown
from megatron_opd.data.calls import read_tools
from megatron_opd.data.chats import ASSISTANT, TOOL, USER, Chat, RowChat
from megatron_opd.data.faults import Unusable
from megatron_opd.data.messages import read_chat
from megatron_opd.data.verifiers.reward import out_of_numpy
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.protocol import Said, TrajectoryEnd
from megatron_opd.records.drops import ENVIRONMENT_BAD_REPLY, ENVIRONMENT_TOO_LONG
from megatron_opd.records.turn_faults import MOST_REWARD, is_reward

_SAYS = "messages"


@dataclass(frozen=True, slots=True)
class Answered:
    """Holds a checked answer. messages: none at the end, which is `ended`. reward: if given."""

    messages: Chat
    reward: float | None
    ended: bool


def read_beginning(said: Any, tools: Sequence[Mapping[str, Any]], most_bytes: int) -> Chat:
    """Return what an environment says first. most_bytes: of all texts in it, as UTF-8.

    tools: as read_declared returns them. EnvironmentFailed: it cannot be that.
    """
    with _whatever_it_does():
        chat = _chat(said, most_bytes)
        if chat[-1].role == ASSISTANT:
            what = "start must not say an assistant's message last, which the student writes"
            raise bad_reply(what)
        return RowChat.of(chat, tools)


def read_answer(said: Any, most_bytes: int) -> Answered:
    """Return what an environment says to a turn; see read_beginning."""
    with _whatever_it_does():
        if isinstance(said, TrajectoryEnd):
            return Answered((), _finite(said.reward), ended=True)
        reward = _finite(said.reward) if isinstance(said, Said) else None
        chat = _chat(said.messages if isinstance(said, Said) else said, most_bytes)
        wrong = next((m.role for m in chat if m.role not in (USER, TOOL)), None)
        if wrong is not None:
            what = f"step must say messages of the user or of tools, got one of the {wrong}"
            raise bad_reply(what)
        return Answered(chat, reward, ended=False)


def read_declared(tools: Any, most_bytes: int) -> Sequence[Mapping[str, Any]]:
    """Return the tools that an environment declares; see read_beginning."""
    with _whatever_it_does():
        return read_tools(_whole(tools, _Left(most_bytes)), "tools")


def bad_reply(what: str) -> EnvironmentFailed:
    """Return the failure of an environment that says what it may not."""
    return EnvironmentFailed(ENVIRONMENT_BAD_REPLY, line(what))


@contextmanager
def _whatever_it_does() -> Iterator[None]:
    try:
        yield
    except EnvironmentFailed:
        raise
    except Unusable as fault:
        raise bad_reply(fault.what) from None
    except Exception as error:  # noqa: BLE001  a user's value raises what it likes where it is read
        raise bad_reply(f"what it says cannot be read: {described(error)}") from None


def _chat(said: Any, most_bytes: int) -> Chat:
    if not isinstance(said, str | list | tuple) or not said:
        raise bad_reply(f"it must say a text or messages, got {shown(said, 60)}")
    found = _whole(said, _Left(most_bytes))
    value = [{"role": USER, "content": found}] if isinstance(found, str) else found
    chat = read_chat({_SAYS: value}, _SAYS)
    assert not isinstance(chat, str), "a list is read as messages"
    return chat


class _Left:
    """Counts down the bytes of an answer."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, limit

    def take(self, text: str) -> None:
        """Count a text. EnvironmentFailed: there is none left."""
        self.bytes -= len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if self.bytes < 0:
            raise EnvironmentFailed(
                ENVIRONMENT_TOO_LONG, f"an answer must have at most {self.limit} bytes"
            )


def _whole(value: Any, left: _Left, depth: int = 0) -> Any:
    """Return a value of plain types, the halves of characters in its texts replaced or joined."""
    if depth > 32:
        raise bad_reply("it must say messages of at most 32 levels")
    left.take(value if isinstance(value, str) else " ")
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {
            _whole(str(name), left): _whole(each, left, depth + 1)
            for name, each in value.items()  # pyright: ignore[reportUnknownVariableType]
        }
    if isinstance(value, list | tuple):
        return [_whole(each, left, depth + 1) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _finite(reward: Any) -> float | None:
    reward = out_of_numpy(reward)
    if reward is None:
        return None
    if isinstance(reward, bool | int | float) and is_reward(reward):
        return float(reward)
    most = f"of at most {MOST_REWARD:g} in size"
    raise bad_reply(f"a reward must be a finite number {most}, got {shown(reward, 60)}")
