"""Checks the rules on evaluations that involve several sections; see rules.py."""

from __future__ import annotations

from collections.abc import Callable

from megatron_opd.config.evaluation import reported_ks
from megatron_opd.config.tree import ConfigTree

Rule = Callable[[ConfigTree], str | None]


def _sets(config: ConfigTree) -> str | None:
    name, names = config.evaluation.best_set, list(config.data.heldout)
    if name is not None and name not in names:
        return (
            "evaluation.best_set must name a set of data.heldout "
            f"({', '.join(names) or 'there is none'}), got {name}"
        )
    return None


def _pass_at(config: ConfigTree) -> str | None:
    k = config.evaluation.best_k
    settings = config.best_set
    if k is None or settings is None or k in reported_ks(settings.samples):
        return None
    names = ", ".join(f"pass@{each}" for each in reported_ks(settings.samples))
    return (
        f"evaluation.best_metric must be accuracy or one of {names}, which are estimated from the "
        f"{settings.samples} samples of the set evaluation.best_set, got pass@{k}"
    )


def _without_every(config: ConfigTree) -> str | None:
    evaluation = config.evaluation
    if evaluation.problems and evaluation.every:
        return None
    dependent = {
        "evaluation.blocks": (evaluation.blocks, "false"),
        "evaluation.servers": (evaluation.servers, "0"),
        "evaluation.patience": (evaluation.patience, "0"),
        "checkpoint.keep_best": (config.checkpoint.keep_best, "false"),
    }
    for key, (value, off) in dependent.items():
        if value:
            return (
                f"{key} has no effect without evaluations while the run trains; set "
                f"evaluation.every and evaluation.problems above 0, or {key} {off}"
            )
    return None


def _at_weight_syncs(config: ConfigTree) -> str | None:
    every, sync_every = config.evaluation.every, config.schedule.sync_every
    if every % sync_every == 0:
        return None
    return (
        "evaluation.every must be a multiple of schedule.sync_every, because only what a weight "
        f"sync brings to the servers can be evaluated, got {every} and {sync_every}"
    )


def _in_turn(config: ConfigTree) -> str | None:
    evaluation = config.evaluation
    if config.schedule.time_shared and evaluation.every and not evaluation.blocks:
        return (
            "evaluation.blocks must be true with schedule.time_shared and evaluation.every, "
            "because the servers cannot answer while the learner trains, got false"
        )
    return None


def _servers(config: ConfigTree) -> str | None:
    wanted = config.evaluation.servers
    there = len(config.student.urls) or config.student.servers
    if wanted and wanted >= there:
        return (
            "evaluation.servers must be below the number of student servers (student.servers, or "
            f"student.urls), so that one is left for rollouts, got {wanted} of {there}"
        )
    return None


def _repeatable_end(config: ConfigTree) -> str | None:
    evaluation = config.evaluation
    if config.run.deterministic and evaluation.patience and not evaluation.blocks:
        return (
            "evaluation.blocks must be true with run.deterministic and evaluation.patience, or "
            "timing decides at which update the run stops, got false"
        )
    return None


EVALUATION_RULES: tuple[Rule, ...] = (
    _sets,
    _pass_at,
    _without_every,
    _at_weight_syncs,
    _in_turn,
    _servers,
    _repeatable_end,
)
