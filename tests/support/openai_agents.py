"""Agents that call the student with the real `openai` client."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

OTHERS = 6
"""How many others finish while a slow one waits."""
SHORT = 40
"""Tokens of an answer: below the run's limit, which would end a trajectory."""


async def run(
    base_url: str, api_key: str, row: dict[str, Any], slow_every: int, finished: str
) -> float:
    """Ask, go on in a stream, ask twice at once; the reward is the share of right answers.

    One of `slow_every` waits after its first turn until others have finished: as many files are in
    the directory `finished`.
    """
    slow, ends = row["seed"] % slow_every == 0, Path(finished)
    asked = [{"role": "user", "content": f"{row['seed'] % 9}+3=\n"}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = await said(client, asked)
        while slow and others_finished(ends) < OTHERS:  # noqa: ASYNC110  they are processes
            await asyncio.sleep(0.1)
        again = [*asked, {"role": "assistant", "content": first}, *asked]
        stream: Any = await client.chat.completions.create(
            model="student", messages=again, stream=True, temperature=0.3, max_tokens=SHORT
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        alone = [{"role": "system", "content": "Add."}, *asked]
        both = await asyncio.gather(said(client, alone), said(client, alone))
        answers = [first, "".join(parts), *both]
    if not slow:
        (ends / str(row["seed"])).touch()
    return sum(f"#{row['seed'] % 9 + 3}" in answer for answer in answers) / len(answers)


def others_finished(ends: Path) -> int:
    """How many trajectories have left a file."""
    return len(list(ends.iterdir()))


async def said(client: AsyncOpenAI, messages: list[Any]) -> str:
    """The text of an answer."""
    found = await client.chat.completions.create(
        model="student", messages=messages, max_completion_tokens=SHORT
    )
    return found.choices[0].message.content or ""


async def imports(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Call once; the reward is how many modules of the client that imported."""
    before = set(sys.modules)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await said(client, row["messages"])
    packages = [name.partition(".")[0] for name in set(sys.modules) - before]
    return sum(package in ("openai", "httpx", "httpcore", "certifi") for package in packages)
