"""Notes what a configuration allows but probably does not mean, for `opd check` and for a run."""

from __future__ import annotations

from megatron_opd.config.rules import key_of_teacher
from megatron_opd.config.schema import Config


def notes(config: Config) -> list[str]:
    """Return one line for each such setting."""
    return [line for line in (_trust(config), _teacher(config)) if line is not None]


def _trust(config: Config) -> str | None:
    estimator = config.estimator
    bounded = any(objective.trust_region.bounds for objective in estimator.objectives)
    if bounded and estimator.applied_correction.prox and config.learner.num_mini_batches == 1:
        return (
            "objective.trust has no effect: with correction.prox and learner.num_mini_batches 1 "
            "the ratio it bounds is always 1; use more mini-batches, or trust.type none"
        )
    return None


def _teacher(config: Config) -> str | None:
    if not config.all_teachers or config.estimator.reads_teacher:
        return None
    keys = ", ".join(map(key_of_teacher, config.all_teachers))
    return (
        f"{keys} has no effect: objective.type {config.objective.type} reads no teacher, so no "
        "server is started for it"
    )
