"""Lets a student answer a row with the help of tools.

The trajectory ends with the first turn that calls none; the row's verifier judges its text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_opd.environments.calls import Reply, ToolCall
from megatron_opd.environments.protocol import EnvironmentRow, Messages, TrajectoryEnd


class ToolError(Exception):
    """Reports to the student, as the tool's answer, why a call has no result."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """Holds a tool. parameters: JSON schema of an object. run: is given what fits it.

    run raises ToolError for what the student is to read; anything else spoils the trajectory.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[Mapping[str, Any]], Awaitable[str]]

    @property
    def schema(self) -> Mapping[str, Any]:
        """Returns the tool as chat templates take it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


class ToolEnvironment:
    """Answers the calls of each turn, in their order."""

    def __init__(self, tools: Sequence[CallableTool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.tools = tuple(tool.schema for tool in tools)

    async def start(self, row: EnvironmentRow) -> Messages:
        """Return the row's prompt."""
        if isinstance(row.prompt, str):
            return row.prompt
        return [{"role": m.role, "content": m.content, **m.others} for m in row.prompt]

    async def step(self, reply: Reply) -> Messages | TrajectoryEnd:
        """Return what the tools answer; the end where none was called."""
        if not reply.calls:
            return TrajectoryEnd()
        return [await self._answered(call) for call in reply.calls]

    async def _answered(self, call: ToolCall) -> dict[str, Any]:
        answer = {"role": "tool", "tool_call_id": call.id, "name": call.name or "unknown"}
        if call.error is not None:
            return {**answer, "content": f"error: {call.error}"}
        try:
            return {**answer, "content": await self._tools[call.name].run(call.arguments)}
        except ToolError as error:
            return {**answer, "content": f"error: {error}"}
