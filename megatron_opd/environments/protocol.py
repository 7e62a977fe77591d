"""Defines what an environment is: whom the student speaks with, turn by turn.

An environment is a class that is made for every trajectory. It says what the student reads first,
and answers each of the student's turns, until it ends the conversation with a reward. It is
asynchronous: other trajectories go on while it waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from megatron_opd.config.import_path import is_import_path, load_object
from megatron_opd.config.wording import line, shown
from megatron_opd.data.chats import Chat, chat_of
from megatron_opd.environments.calls import Reply
from megatron_opd.records.types import Prompt, RightAnswer

Messages = str | Sequence[Mapping[str, Any]]
"""A text, which is a user's message, or messages: {"role": ..., "content": ...} and what a chat
template reads besides."""


@dataclass(frozen=True, slots=True)
class EnvironmentRow:
    """Holds the row that a trajectory is about.

    answer: what the row's verifier compares with. seed: of the trajectory, for what is random.
    columns: those of environment.columns, by name. tools: the row's own, of which the student is
    told what the environment declares.
    """

    prompt: str | Chat
    answer: RightAnswer | None = None
    seed: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: Sequence[Mapping[str, Any]] = ()


def row_of(prompt: Prompt, seed: int) -> EnvironmentRow:
    """Return what an environment is told of a prompt. seed: of the trajectory."""
    asked = chat_of(prompt.messages, prompt.tools) if prompt.messages else prompt.text
    return EnvironmentRow(asked, prompt.answer, seed, prompt.columns, prompt.tools)


@dataclass(frozen=True, slots=True)
class Said:
    """Continues with messages, and a reward for the turn that they answer, if it has one."""

    messages: Messages
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryEnd:
    """Ends the trajectory. reward: for its last turn, if it has one.

    Where no turn has a reward the row's verifier judges the text of the last one.
    """

    reward: float | None = None


@runtime_checkable
class Environment(Protocol):
    """Speaks with the student.

    It may have `tools`, a sequence of JSON schemas as chat templates take them; the calls of a
    reply are then read and checked (calls.py).
    """

    async def start(self, row: EnvironmentRow) -> Messages:
        """Return what the student reads first."""
        ...

    async def step(self, reply: Reply) -> Messages | Said | TrajectoryEnd:
        """Return what is said to a turn, or the end."""
        ...


def tools_of_environment(environment: Environment) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that an environment declares."""
    return tuple(getattr(environment, "tools", ()))


def make_environment(kind: str, options: Mapping[str, Any]) -> Environment:
    """Return a new environment. kind: a built-in's name, or MODULE:CLASS.

    ValueError: there is none of that name, it cannot be made with these options, or is none.
    """
    path = kind if is_import_path(kind) else BUILT_IN.get(kind)
    if path is None:
        raise ValueError(
            f"environment.type must be {', '.join(BUILT_IN)} or MODULE:CLASS, got {shown(kind)}"
        )
    kind_of = load_object(path)
    try:
        made = kind_of(**options)
    except Exception as error:  # noqa: BLE001  whatever a user's class raises is told in one line
        raise ValueError(f"environment: {path} cannot be made: {line(error)}") from None
    if not isinstance(made, Environment):
        raise ValueError(f"environment.type: {path} must have async methods start and step")
    return made


_HERE = __name__.rpartition(".")[0]
BUILT_IN: Mapping[str, str] = {
    "calculator": f"{_HERE}.calculator:CalculatorEnvironment",
    "python": f"{_HERE}.python:PythonEnvironment",
    "guess": f"{_HERE}.guess:GuessEnvironment",
}
"""Where the built-in environments are imported from, by the names that environment.type takes."""
