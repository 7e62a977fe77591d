"""An agent that lets the student solve a problem, and once more where it was wrong."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def run(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Return the reward: 1 where the first answer is right, 0.5 where the second one is, or 0."""
    messages: list[Any] = list(row["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for reward in (1.0, 0.5):
            reply = await client.chat.completions.create(model="student", messages=messages)
            answer = reply.choices[0].message
            if (answer.content or "").strip().endswith(f"#{row['answer']}"):
                return reward
            again = {"role": "user", "content": row["messages"][-1]["content"]}
            messages += [answer, again]
    return 0.0
