"""Evaluations of fake completions on a virtual clock."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_opd.config.evaluation import EvaluationConfig
from megatron_opd.config.verifier import VerifierConfig
from megatron_opd.data.judge import Judge
from megatron_opd.data.response_text import ResponseText
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.data.verifying import TaskVerifiers
from megatron_opd.evaluation.evaluations import Evaluations, Surroundings
from megatron_opd.evaluation.examiner import EvaluationPlan
from megatron_opd.evaluation.ports import Completion
from megatron_opd.evaluation.sets import EvaluatedSet
from megatron_opd.records.types import Prompt

TOKENIZER = build_tokenizer()
RIGHT, WRONG = "#1<eos>", "#2<eos>"


def make_judge() -> Judge:
    verifiers = TaskVerifiers(("arithmetic",), VerifierConfig())
    return Judge(verifiers, "arithmetic", ResponseText(TOKENIZER.decode))


def some_set(first_id: int, problems: int = 4, samples: int = 1) -> EvaluatedSet:
    """Problems whose prompts are one id each: first_id, first_id + 1, ..."""
    prompts = tuple(
        Prompt(uid=i, text=f"p{i}", token_ids_P=np.array([first_id + i], np.int32), answer="1")
        for i in range(problems)
    )
    return EvaluatedSet(prompts, EvaluationPlan(samples, 1.0, 8, concurrency=50))


@dataclass
class World:
    """A run around its evaluations: what is served, and what it was told.

    right: ids of the prompts that are answered rightly. A completion takes `answer_s`; one of an id
    in `broken` fails.
    """

    answer_s: float = 1.0
    right: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    updates: int = 0
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    ended_early: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    stop: Callable[[], None] = lambda: None
    trained_s: float = 0.0
    end_ids: tuple[int, ...] = (1,)

    async def complete(
        self,
        prompt_ids: Any,
        *,
        max_new_tokens: int,
        temperature: float,
        stop: tuple[str, ...],
        seed: int,
        prefer: str = "",
    ) -> Completion:
        (asked,) = prompt_ids
        first = self.updates
        self.asked.append(asked)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.answer_s)
        finally:
            self.in_flight -= 1
        if asked in self.broken:
            raise ConnectionError("server gone")
        text = RIGHT if asked in self.right else WRONG
        return Completion(TOKENIZER.encode(text), "stop", (first, self.updates))

    def end_early(self) -> None:
        self.ended_early += 1
        self.stop()

    def evaluations(
        self,
        sets: Mapping[str, EvaluatedSet] | None = None,
        last_update: int = 100,
        **settings: Any,
    ) -> Evaluations:
        config = EvaluationConfig.model_validate({"every": 10, **settings})
        run = Surroundings(
            port=lambda: self,
            updates=lambda: self.updates,
            elapsed_s=lambda: asyncio.get_running_loop().time(),
            record=self.rows.append,
            end_early=self.end_early,
            say=self.said.append,
        )
        sets = {"easy": some_set(10)} if sets is None else sets
        return Evaluations(config, sets, make_judge(), run, last_update)

    async def train(self, found: Evaluations, updates: int, update_s: float = 0.1) -> None:
        """Make updates until there are so many; each version is live at once."""
        while self.updates < updates:
            await asyncio.sleep(update_s)
            self.updates += 1
            found.live(self.updates)
            if found.waits:  # as run.evaluations.EvaluatingKeeper does
                await found.waited_for(self.updates)
