"""Says which held-out sets a configuration evaluates, and how."""

from __future__ import annotations

from megatron_opd.config.evaluation import SetSettings
from megatron_opd.config.schema import Config
from megatron_opd.evaluation.measure import EvaluationPlan
from megatron_opd.evaluation.ports import EvaluatedSet
from megatron_opd.inputs.prepare import Prepared


def evaluated_sets(config: Config, prepared: Prepared) -> dict[str, EvaluatedSet]:
    """Return the sets of a run by name; none without a verifier."""
    if prepared.judge is None:
        return {}
    settings = config.heldout
    return {
        name: EvaluatedSet(prompts, evaluation_plan(config, settings[name]))
        for name, prompts in prepared.heldout.items()
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
