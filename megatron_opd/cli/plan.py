"""Runs `opd plan`: searches for the split of GPUs, layout and schedule with the highest throughput.

The search is megatron_opd/search; here are its input, the simulation of a candidate, and what is
printed and written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.plan_result import Measured, Plan, throughput
from megatron_opd.cli.plan_tables import plan_report
from megatron_opd.cli.preflight import (
    check_context,
    check_models,
    check_support,
    longest_sample,
    read_models,
)
from megatron_opd.cli.prepare import checked
from megatron_opd.cli.roles import STUDENT, section_of, teacher_roles
from megatron_opd.cli.simulate import lengths_of
from megatron_opd.cli.simulated_outcome import Outcome
from megatron_opd.cli.simulation import simulate
from megatron_opd.config.load import validate
from megatron_opd.config.plain_yaml import dump_plain
from megatron_opd.config.schema import Config
from megatron_opd.config.simulation import Gpu
from megatron_opd.search.bounds import Bounds
from megatron_opd.search.candidates import Candidate, Space
from megatron_opd.search.configs import SEARCHED, chosen_tree
from megatron_opd.search.costing import Costing, Task, largest_bound, space_of
from megatron_opd.search.demand import Demand, Window, demand_of
from megatron_opd.search.search import Found, search
from megatron_opd.search.space import Losers, Pins
from megatron_opd.sim.costs import Lengths
from megatron_opd.sim.hardware import CATALOGUE

DEFAULT_GPU = "h100"
EVERY_S = 10.0
"""Seconds between two lines of progress."""


def run_plan(
    config: Config,
    console: Console,
    *,
    gpus: int,
    gpu: str | None = None,
    staleness: int | None = None,
    keep: Sequence[str] = (),
    out: Path | None = None,
    trials: int | None = None,
    window: Window | None = None,
) -> int:
    """Print what a search found, and write the winner to `out`. Raises UserError."""
    if out is not None and out.exists():
        raise UserError(f"--out: {out} exists already; choose another file or remove it")
    if trials is not None and trials < 0:
        raise UserError(f"--trials must be >= 0, got {trials}")
    if config.evaluation.servers:
        raise UserError(
            "opd plan needs evaluation.servers 0, because every server that it plans is for "
            f"rollouts, got {config.evaluation.servers}; add them to the plan's student.servers"
        )
    chosen = known_gpu(gpu or config.simulation.gpu or DEFAULT_GPU)
    task = task_of(config, gpus, chosen, staleness, pins_of(keep))
    plan = make_plan(task, chosen, window or Window(), trials or None, _progress())
    tree = chosen_tree(config, plan.winner.candidate, chosen, task.memory_gib)
    check_models(validate(Config, tree, "opd plan"), plan=True)
    for line in plan_report(plan):
        console.print(line, soft_wrap=isinstance(line, str))
    if out is not None:
        try:
            out.write_text(_header(plan) + dump_plain(tree), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out: cannot write {out}: {error.strerror}") from None
        console.print(f"written: {out}", soft_wrap=True)
    return 0


def _header(plan: Plan) -> str:
    """Return the comment that begins the file."""
    return (
        f"# Chosen by opd plan for {plan.task.gpus} {plan.gpu} GPUs, staleness at most "
        f"{plan.task.staleness}: {throughput(plan.winner, plan.demand):,.0f} response tokens/s "
        "predicted\n"
    )


def _progress() -> Callable[[Found], None]:
    """Return what prints a line now and then on standard error."""
    said_s = time.monotonic()

    def tell(found: Found) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= EVERY_S:
            said_s = time.monotonic()
            print(  # noqa: T201
                f"{found.enumerated:,} candidates, {len(found.trials)} simulated", file=sys.stderr
            )

    return tell


def known_gpu(name: str) -> Gpu:
    """Return a GPU of the catalogue. UserError: it is none."""
    if name not in CATALOGUE:
        raise UserError(f"--gpu must be one of {', '.join(get_args(Gpu))}, got {name!r}")
    return cast(Gpu, name)


def pins_of(keep: Sequence[str]) -> Pins:
    """Return the keys of every --keep; a section stands for all of its keys. Raises UserError."""
    named = [key.strip() for each in keep for key in each.split(",") if key.strip()]
    keys: set[str] = set()
    for name in named:
        meant = {key for key in SEARCHED if key == name or key.startswith(f"{name}.")}
        if not meant:
            raise UserError(
                f"--keep must name keys that opd plan chooses, got {name!r}; they are: "
                f"{', '.join(SEARCHED)}"
            )
        keys |= meant
    return Pins(frozenset(keys))


def task_of(config: Config, gpus: int, gpu: Gpu, staleness: int | None, pins: Pins) -> Task:
    """Check the input and read the models. Raises UserError."""
    roles = teacher_roles(config)
    node = config.cluster.ranks_per_node
    _check_plannable(config, gpus, node)
    bound = config.schedule.bound(config.buffer.batch_size)
    limit = bound if staleness is None else staleness
    if limit < 0:
        raise UserError(f"--staleness must be >= 0, got {limit}")
    models = read_models(config)
    check_support(config, models[STUDENT])
    check_context(config, models)
    teacher = next(((name, models[role].spec) for name, role in roles.items()), None)
    return Task(
        config=config,
        student=models[STUDENT].spec,
        teacher=teacher,
        hardware=CATALOGUE[gpu],
        gpus=gpus,
        node=node,
        staleness=limit,
        longest=longest_sample(config, models[STUDENT]),
        contexts={
            role: section_of(config, role).context_length or facts.context_length
            for role, facts in models.items()
        },
        pins=pins,
    )


def _check_plannable(config: Config, gpus: int, node: int) -> None:
    """Raise UserError where the configuration leaves nothing to plan, or contradicts --gpus."""
    if gpus < 2:
        raise UserError(
            f"--gpus must be at least 2, for a learner and a student server, got {gpus}"
        )
    if gpus > node and gpus % node:
        raise UserError(
            f"--gpus beyond one node must be whole nodes of {node} (cluster.ranks_per_node), got "
            f"{gpus}"
        )
    if gpus > node and config.cluster.type == "local":
        raise UserError(
            f"--gpus {gpus} is more than one node of {node}, which cluster.type local cannot use; "
            "add --set cluster.type=slurm or ray"
        )
    roles = teacher_roles(config)
    if len(roles) > 1 or (roles and "teacher" not in roles):
        raise UserError(
            f"teachers: opd plan splits GPUs among one student and the one section teacher, got "
            f"{', '.join(roles)}"
        )
    for key in (STUDENT, *roles.values()):
        if section_of(config, key).urls:
            raise UserError(f"{key}.urls must be empty: opd plan places the servers itself")
    if config.schedule.order != "admission":
        raise UserError(
            "schedule.order must be admission for opd plan, whose bounds are proven for it, got "
            f"{config.schedule.order}; add --set schedule.order=admission, without max_age"
        )
    if config.schedule.time_shared:
        raise UserError(
            "schedule.time_shared must be false for opd plan, which splits GPUs between servers "
            "and learner, got true; add --set schedule.time_shared=false"
        )
    if config.simulation.costs is not None:
        raise UserError(
            "simulation.costs must be null for opd plan, because a file holds the costs of one "
            f"layout, got {config.simulation.costs}; costs follow from --gpu"
        )


def make_plan(
    task: Task,
    gpu: Gpu,
    window: Window,
    trials: int | None = None,
    progress: Callable[[Found], None] | None = None,
) -> Plan:
    """Find the front. trials: see search.search. Raises UserError."""
    began_s = time.monotonic()
    lengths = lengths_of(task.config)
    demand, losers = demand_of(task.config, lengths, window, task.staleness + 1), Losers()
    space = checked(lambda: space_of(task, demand, losers))
    bounds = bounds_of(task, demand, space)
    run = simulator(task, demand, gpu, lengths)
    found = search(space, bounds, run, most=trials, progress=progress)
    return Plan(task, gpu, demand, space, losers, found, time.monotonic() - began_s)


def bounds_of(task: Task, demand: Demand, space: Space) -> Bounds:
    """Return the bounds that hold for every candidate of a space."""
    overlaps = task.config.weight_sync.overlap
    return Bounds(demand, spare=largest_bound(space.schedules), overlaps=overlaps)


def simulator(
    task: Task, demand: Demand, gpu: Gpu, lengths: Lengths
) -> Callable[[Candidate], Measured]:
    """Return what simulates a candidate."""
    costing = Costing(task)

    def run(candidate: Candidate) -> Measured:
        config = config_of(task, candidate, gpu)
        costs = checked(lambda: costing.costs(candidate))
        updates = demand.window.updates(candidate.schedule.permits, demand.batch_size)
        section = config.run.model_copy(update={"max_steps": updates})
        simulation = config.simulation.model_copy(update={"failures": None})
        short = config.model_copy(update={"run": section, "simulation": simulation})
        return measured(simulate(short, costs, lengths), demand)

    return run


def measured(outcome: Outcome, demand: Demand) -> Measured:
    """Return the seconds of the window. They are of the tokens that the bounds are of."""
    done = outcome.totals.throughput.updates
    window = demand.window
    tokens = sum(count for count, _ in done[window.first : window.last])
    assert tokens == demand.tokens, "the simulation trained other samples than the bounds are of"
    return Measured(done[window.last - 1][1] - done[window.first - 1][1], outcome.busy)


def config_of(task: Task, candidate: Candidate, gpu: Gpu) -> Config:
    """Return a candidate's configuration."""
    return validate(Config, chosen_tree(task.config, candidate, gpu, task.memory_gib), "opd plan")
