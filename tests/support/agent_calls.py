"""Agents that call the endpoint with the real `openai` client, and samplers of scripted turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import openai

from megatron_opd.environments.agent.endpoint import AgentEndpoint, agent_endpoint
from megatron_opd.environments.agent.recorder import AgentTrajectory, Student
from megatron_opd.environments.call_format import call_format
from megatron_opd.environments.play import Played, TurnSample
from megatron_opd.environments.trajectory import BuiltTrajectory, TrajectoryLimits
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.records.runs import runs_fault
from tests.support.chat_families import BY_NAME, ChatFamily

WIDE = TrajectoryLimits(max_turns=40, max_tokens=10**6, max_turn_tokens=1000, max_sequences=40)
SAMPLING = {"temperature": 1.0, "top_p": 1.0}
QWEN = BY_NAME["qwen3"]
ASKED: list[Any] = [{"role": "user", "content": "How much is 2 + 3?"}]
MORE = {"role": "user", "content": "And 1 more?"}


@dataclass
class ScriptedSampler:
    """Samples given turns, of ids or as texts, then random ids of a family's vocabulary.

    asked, sampled: the ids before each turn and its own, in the order in which they came back.
    held: waits for it before it answers.
    """

    family: ChatFamily
    turns: list[str] = field(default_factory=list)
    seed: int = 0
    held: asyncio.Event | None = None
    asked: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    stops: list[tuple[str, ...]] = field(default_factory=list)
    turns_of_ids: list[list[int]] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    async def __call__(
        self, ids: Sequence[int], room: int, *, stop: Sequence[str] = ()
    ) -> TurnSample:
        self.begun.set()
        if self.turns_of_ids:
            turn = self.turns_of_ids.pop(0)
        else:
            turn = self.family.ids(self.turns.pop(0)) if self.turns else self._babble()
        if self.held is not None:
            await self.held.wait()
        else:
            for _ in range(self._random.randint(0, 3)):  # parallel turns overtake each other
                await asyncio.sleep(0)
        self.asked.append(list(ids))
        self.sampled.append(turn[:room])
        self.stops.append(tuple(stop))
        return TurnSample(turn[:room], cut=len(turn) > room, cached=len(ids) // 2)

    def _babble(self) -> list[int]:
        ends = self.family.tokenizer().convert_tokens_to_ids(list(self.family.ends))
        size = len(self.family.tokenizer())
        turn = [self._random.randrange(size) for _ in range(self._random.randint(1, 8))]
        return [*(i for i in turn if i not in ends), self._random.choice(ends)]


def student(
    family: ChatFamily, limits: TrajectoryLimits = WIDE, history: Any = "append"
) -> Student:
    return Student(*_written(family), limits, history)


@cache
def _written(family: ChatFamily) -> tuple[TurnEncoder, Any]:
    encoder = family.encoder()
    return encoder, "no format" if family.format is None else call_format(encoder)


@dataclass
class Served:
    """A trajectory that is served: its client, and its parts."""

    client: openai.AsyncOpenAI
    trajectory: AgentTrajectory
    sampler: ScriptedSampler
    endpoint: AgentEndpoint
    key: str

    async def said(self, messages: Sequence[Any], **keys: Any) -> Any:
        """The message of a completion, as an agent appends it."""
        made: Any = self.client.chat.completions
        found = await made.create(model="student", messages=list(messages), **keys)
        return found.choices[0].message

    async def played(self, reward: float | None = None) -> Played:
        await self.trajectory.close()
        return self.trajectory.played(reward)


@asynccontextmanager
async def served(of: Student, sampler: ScriptedSampler, **keys: Any) -> AsyncIterator[Served]:
    """Serve one trajectory."""
    async with agent_endpoint(2**20, SAMPLING) as endpoint:
        trajectory = AgentTrajectory(of, sampler, keys.pop("timeout_s", 300.0))
        with endpoint.serving(trajectory) as key:
            # without certificates, which take a tenth of a second to read
            http = openai.DefaultAsyncHttpxClient(verify=False)
            async with openai.AsyncOpenAI(
                base_url=endpoint.base_url, api_key=key, max_retries=0, http_client=http
            ) as client:
                try:
                    yield Served(client, trajectory, sampler, endpoint, key)
                finally:
                    await trajectory.close()


def check_trained(built: BuiltTrajectory, sampler: ScriptedSampler) -> None:
    """Each sampled turn is one run, behind exactly the ids that it was sampled from."""
    assert runs_fault([len(each) for each in built.sequences], built.runs) is None
    runs = sorted(built.runs, key=lambda run: run.turn)
    assert [run.turn for run in runs] == list(range(len(sampler.sampled)))
    trained = [built.sequences[r.sequence][r.start : r.stop].tolist() for r in runs]
    assert trained == sampler.sampled
    assert [built.sequences[r.sequence][: r.start].tolist() for r in runs] == sampler.asked


def played(
    agent: Callable[[Served], Awaitable[Any]],
    *turns: str,
    limits: TrajectoryLimits = WIDE,
    history: str = "append",
    **keys: Any,
) -> tuple[Any, Played]:
    """What an agent returns, and its trajectory, whose ids are those sampled."""

    async def run() -> list[Any]:
        sampler = ScriptedSampler(QWEN, list(turns), **keys)
        async with served(student(QWEN, limits, history), sampler) as at:
            found = await agent(at)
            trajectory = await at.played(1.0)
        check_trained(trajectory.trajectory, sampler)
        return [found, trajectory]  # a list: asyncio prints its task's result

    found, trajectory = asyncio.run(run())
    return found, trajectory
