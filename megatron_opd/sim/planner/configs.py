"""Makes the configuration of a candidate: the user's, with the keys that the search chose."""

from __future__ import annotations

from typing import Any, cast

from megatron_opd.config.schema import Config
from megatron_opd.sim.planner.candidates import Candidate

Tree = dict[str, Any]

SEARCHED = (
    *(f"learner.parallel.{name}" for name in ("tp", "pp", "cp", "dp", "ep")),
    *("student.tp", "student.servers", "teacher.tp", "teacher.servers"),
    *("schedule.type", "schedule.max_staleness", "schedule.sync_every", "schedule.in_flight"),
    *("rollout.concurrency", "scoring.concurrency"),
)
"""Keys that a search chooses unless they are kept."""


def chosen_tree(config: Config, candidate: Candidate, gpu: str, memory_gib: float) -> Tree:
    """Return the keys that the user set, with those that a candidate sets.

    GPUs are laid out by the placement's own rules, so no list of them is left. evaluation.every is
    rounded up to a weight sync. memory_gib: of a GPU.
    """
    tree = config.model_dump(mode="json", exclude_unset=True)
    parallel = candidate.learner.parallel.model_dump(mode="json")
    learner = _section(tree, "learner")
    _drop(learner, "gpus")
    learner |= {"parallel": _without_defaults(parallel), "gpu_memory_gib": memory_gib}
    schedule = _section(tree, "schedule")
    _drop(schedule, "hold_batches", "max_age")
    chosen = candidate.schedule.config.model_dump(mode="json")
    schedule |= {name: chosen[name] for name in ("type", "max_staleness", "sync_every")}
    schedule["in_flight"] = chosen["in_flight"]
    if candidate.schedule.config.hold_batches is not None:
        schedule["hold_batches"] = candidate.schedule.config.hold_batches
    roles = {"student": (candidate.student, candidate.servers)}
    if candidate.teacher is not None:
        roles["teacher"] = (candidate.teacher, candidate.teachers)  # type: ignore[assignment]
    for role, (size, servers) in roles.items():
        section = _section(tree, role)
        _drop(section, "gpus")
        section |= {"servers": servers, "tp": size.tp, "ep": size.ep, "gpu_memory_gib": memory_gib}
    _section(tree, "rollout")["concurrency"] = candidate.concurrency
    if candidate.teacher is not None:
        _section(tree, "scoring")["concurrency"] = candidate.scoring
    _section(tree, "simulation")["gpu"] = gpu
    every, sync_every = config.evaluation.every, schedule["sync_every"]
    if every % sync_every:  # only what a weight sync brings to the servers can be evaluated
        _section(tree, "evaluation")["every"] = -(-every // sync_every) * sync_every
    return tree


def _section(tree: Tree, name: str) -> Tree:
    return cast(Tree, tree.setdefault(name, {}))


def _drop(section: Tree, *names: str) -> None:
    for name in names:
        section.pop(name, None)


def _without_defaults(parallel: Tree) -> Tree:
    """Return a layout without what is left out by default."""
    return {name: value for name, value in parallel.items() if value is not None}
