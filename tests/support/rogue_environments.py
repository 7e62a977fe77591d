"""Environments that misbehave, each in its own way, for tests to play."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_opd.environments.calls import Reply
from megatron_opd.environments.protocol import EnvironmentRow, Said, TrajectoryEnd
from tests.support.rogue_agents import orphan


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class RogueEnvironment:
    """Does in its first step what `does` or its row's answer names.

    well: it says `text`, and ends in its third step with the number 3 as its reward.
    """

    def __init__(self, does: str = "well", text: str = "Go on.") -> None:
        self._does, self._text, self._turns = does, text, 0

    async def start(self, row: EnvironmentRow):
        self._does = str(row.answer or self._does)
        if self._does.startswith("start_"):
            return await self._misbehave(self._does.removeprefix("start_"))
        return f"{row.prompt}{dict(row.columns) or ''}"

    async def step(self, reply: Reply):
        self._turns += 1
        if self._does == "well":
            return Said(self._text, 0.5) if self._turns < 3 else TrajectoryEnd(self._turns)
        return await self._misbehave(self._does)

    async def _misbehave(self, does: str):
        match does:
            case "raises":
                raise RuntimeError("two\nlines \x1b[31m")
            case "raises_unprintable":
                raise UnprintableError
            case "exits":
                raise SystemExit(3)
            case "cancels":
                raise asyncio.CancelledError
            case "eats":
                return "x" * (1 << 40)
            case "eats_some":
                return bytes(3 << 30)
            case "hangs":
                await asyncio.sleep(3600)
            case "hangs_stubbornly":
                for _ in range(4):
                    try:
                        await asyncio.sleep(0.2)
                    except asyncio.CancelledError:
                        continue
            case "hangs_in_c":
                time.sleep(3600)  # noqa: ASYNC251  which is its fault
            case "dies":
                os._exit(7)
            case "leaves_an_orphan":
                return TrajectoryEnd(orphan())
            case "dies_before_an_orphan":
                Path(os.environ["ORPHAN"]).write_text(str(orphan()))  # noqa: ASYNC240
                os._exit(7)
            case "grows":
                return [{"role": "user", "content": "more " * 1000}] * 1000
            case "deep":
                deep: object = "x"
                for _ in range(10_000):
                    deep = [deep]
                return [{"role": "user", "content": "x", "name": deep}]
        return VALUES[does]


REWARDS: dict[str, object] = {
    "nan": TrajectoryEnd(float("nan")),
    "numpys_nan": TrajectoryEnd(np.float32("nan")),  # pyright: ignore[reportArgumentType]
    "two_numbers": TrajectoryEnd(np.array([1.0, 2.0])),  # pyright: ignore[reportArgumentType]
    "endless_reward": TrajectoryEnd(float("inf")),
}
"""Ends that step alone may be asked for, with rewards that are none."""
VALUES: dict[str, object] = {
    **REWARDS,
    "nothing": None,
    "empty": "",
    "number": 7,
    "bytes": b"hello",
    "no_messages": [],
    "no_role": [{"content": "x"}],
    "stranger": [{"role": "wizard", "content": "x"}],
    "system": [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
    "assistant": [{"role": "assistant", "content": "x"}],
    "picture": [{"role": "user", "content": [{"type": "image", "image": "x"}]}],
    "object": [{"role": "user", "content": object()}],
    "text_reward": Said("x", "1"),  # pyright: ignore[reportArgumentType]
}


class SyncEnvironment:
    """Has methods that are not asynchronous."""

    def start(self, row: EnvironmentRow) -> str:
        return "hello"

    def step(self, reply: Reply) -> str:
        return "hello"


class ToolsEnvironment(RogueEnvironment):
    """Declares what `tools` is told to be."""

    def __init__(self, tools: object) -> None:
        super().__init__()
        self._tools = tools

    @property
    def tools(self) -> object:
        if isinstance(self._tools, Exception):
            raise self._tools
        return self._tools


class ToolsOfTheRow:
    """Lets the student call what its row names."""

    tools: Sequence[Mapping[str, Any]] = ()

    async def start(self, row: EnvironmentRow):
        self.tools = row.tools
        return [{"role": m.role, "content": m.content} for m in row.prompt]

    async def step(self, reply: Reply):
        return TrajectoryEnd(len(reply.calls))
