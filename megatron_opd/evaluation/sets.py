"""Says which held-out sets a configuration evaluates, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_opd.config.evaluation import SetSettings
from megatron_opd.config.schema import Config
from megatron_opd.evaluation.examiner import EvaluationPlan
from megatron_opd.records.types import Prompt


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """Holds the problems of one held-out set and how they are sampled."""

    prompts: tuple[Prompt, ...]
    plan: EvaluationPlan


def evaluated_sets(
    config: Config, heldout: Mapping[str, tuple[Prompt, ...]]
) -> dict[str, EvaluatedSet]:
    """Return the sets of a run by name. heldout: the problems of each."""
    settings = config.heldout
    return {
        name: EvaluatedSet(prompts, evaluation_plan(config, settings[name]))
        for name, prompts in heldout.items()
    }


def evaluation_plan(config: Config, settings: SetSettings) -> EvaluationPlan:
    """Return how a held-out set is evaluated before and after a run."""
    return EvaluationPlan(
        samples=settings.samples,
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
        concurrency=config.rollout.concurrency,
        seed=config.run.seed,
        stop=config.rollout.stop,
    )
