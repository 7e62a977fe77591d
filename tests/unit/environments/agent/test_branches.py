"""Whatever an agent calls, what is trained on is what was sampled, each id once."""

import asyncio
import json
from random import Random
from typing import Any

import pytest

from megatron_opd.environments.agent.call import read_call
from megatron_opd.environments.agent.recorder import AgentTrajectory
from megatron_opd.environments.agent.refused import Refused
from megatron_opd.environments.trajectory import BuiltTrajectory
from tests.support.agent_calls import SAMPLING, ScriptedSampler, check_trained, student
from tests.support.chat_families import ADD, FAMILIES, ChatFamily

PIECES = ("🙂", "<|im_end|>", "</s>", "<tool_call>", "\uff5c", "é", "the tool", "\n", " ")

AGENTS = 100
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": 3}}\n</tool_call><|im_end|>'


class RandomAgent:
    """Goes on behind, repeats, edits and begins conversations at random, several at once."""

    def __init__(self, family: ChatFamily, seed: int, history: str) -> None:
        self._random = Random(seed)
        self._control = list(family.encoder().literal.control)
        self._tools = [ADD] if family.tools and family.format is not None else []
        self._hermes = family.format == "hermes"
        self._sampler = ScriptedSampler(family, seed=seed)
        self._trajectory = AgentTrajectory(student(family, history=history), self._sampler, 300.0)
        self._known: list[tuple[list[Any], list[Any]]] = []

    def _text(self) -> str:
        pieces = self._random.choices([*PIECES, *self._control], k=self._random.randint(1, 5))
        return "x" + "".join(pieces) + "x"

    def _messages(self) -> tuple[list[Any], list[Any]]:
        """What is asked next, and its tools."""
        if not self._known or self._random.random() < 0.15:
            tools = self._random.choice([self._tools, []])
            system = [{"role": "system", "content": self._text()}]
            front = self._random.choice([[], system])
            return [*front, {"role": "user", "content": self._text()}], tools
        messages, tools = self._random.choice(self._known[-3:])
        edit = self._random.random()
        if edit < 0.1:
            return messages[:-1], tools  # again
        if edit < 0.2 and len(messages) > 2:
            at = self._random.randrange(len(messages) - 1)
            messages = [*messages]
            messages[at] = {**messages[at], "content": self._text()}
        if edit > 0.95:
            tools = [] if tools else self._tools
        called = [call["id"] for call in messages[-1].get("tool_calls", ())]
        answers = [{"role": "tool", "tool_call_id": i, "content": self._text()} for i in called]
        return [*messages, *(answers or [{"role": "user", "content": self._text()}])], tools

    async def _call(self) -> None:
        messages, tools = self._messages()
        if self._hermes and self._random.random() < 0.4:
            self._sampler.turns.append(CALL % self._random.randrange(99))
        asked = {"model": "student", "messages": messages, "tools": tools}
        try:
            answer = await self._trajectory.answer(read_call(json.dumps(asked).encode(), SAMPLING))
        except Refused:
            return  # a template refuses some histories
        said = {"role": "assistant", "content": answer.text}
        if answer.calls:
            said["tool_calls"] = list(answer.calls)
        self._known.append(([*messages, said], tools))

    async def play(self) -> BuiltTrajectory | None:
        for _ in range(self._random.randint(1, 5)):
            await asyncio.gather(*(self._call() for _ in range(self._random.choice([1, 1, 1, 3]))))
        await self._trajectory.close()
        if not self._sampler.sampled:
            return None
        built = self._trajectory.played(None).trajectory
        check_trained(built, self._sampler)
        return built


@pytest.mark.parametrize("history", ["append", "branch"])
def test_the_ids_trained_on_are_the_ids_sampled(history: str):
    """On every family's template, with as many sequences as the agents make."""

    async def play_all() -> list[BuiltTrajectory | None]:
        number = AGENTS if history == "append" else AGENTS // 3
        return [
            await RandomAgent(FAMILIES[seed % len(FAMILIES)], seed, history).play()
            for seed in range(number)
        ]

    found = [each for each in asyncio.run(play_all()) if each is not None]
    assert len(found) > 0.3 * AGENTS
    sequences = [len(each.sequences) for each in found]
    assert sum(count > 1 for count in sequences) > len(found) / 3
    assert sum(len(each.runs) > len(each.sequences) for each in found) > len(found) / 5
