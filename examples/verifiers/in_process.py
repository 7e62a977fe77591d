"""Verifiers' chat loop in the process of its trajectory, with the packages of its interpreter.

The package's own harness `null` does the same in one more process, for which `uv` fetches packages
of other versions from an index whenever they are not cached.
"""

from __future__ import annotations

import importlib
import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

DONE = vf.ProgramResult(0, "", "")
LATE = ("anyio._backends._asyncio", "httpcore", "mcp.client.streamable_http", "openai.resources")
for each in LATE:  # else each trajectory's process, forked from this one, imports them anew: 1 s
    importlib.import_module(each)


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the student and answers its tool calls, until it makes none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run the loop; see vf.Harness.launch."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers_at = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
            )
            tools, where, servers = await connect_mcp(servers_at, stack)
            given = {"tools": tools} if tools else {}
            while True:
                asked: Any = {"model": ctx.model, "messages": messages, **given}
                completion = await client.chat.completions.create(**asked)
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return DONE
                for call in message.tool_calls:
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": call.id,
                            "content": await _result(call, where, servers),
                        }
                    )


async def _result(call: Any, where: dict[str, tuple[str, str]], servers: dict[str, Any]) -> Any:
    """Return what a tool answers, or what is wrong with the call."""
    name = call.function.name
    if name not in where:
        return f"error: there is no tool {name!r}"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments must be JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be an object"
    return await call_mcp(servers, where, name, arguments)


__all__ = ["InProcessHarness"]
