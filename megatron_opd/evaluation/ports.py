"""Names what the evaluations of a run are made of and what they need of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_opd.evaluation.measure import CompletionPort, EvaluationPlan
from megatron_opd.records.types import Prompt


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """Holds the problems of one held-out set and how they are sampled."""

    prompts: tuple[Prompt, ...]
    plan: EvaluationPlan


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Names what evaluations need of their run.

    port: returns what samples from the student. updates: returns those that the learner has made.
    elapsed_s: returns the seconds since training began. record: takes each row. end_early: ends
    training after the update that is being made. say: tells the user.
    """

    port: Callable[[], CompletionPort]
    updates: Callable[[], int]
    elapsed_s: Callable[[], float]
    record: Callable[[Mapping[str, Any]], None]
    end_early: Callable[[], None]
    say: Callable[[str], None]
