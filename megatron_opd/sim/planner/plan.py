"""Plans a run: reads what a search is given, simulates its candidates, and holds what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast, get_args

from megatron_opd.config.load import validate
from megatron_opd.config.roles import STUDENT, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.config.simulation import Gpu
from megatron_opd.errors import UserError, checked
from megatron_opd.inputs.models import (
    check_context,
    check_support,
    longest_sample,
    read_models,
)
from megatron_opd.sim.costs import Lengths
from megatron_opd.sim.inputs import lengths_of
from megatron_opd.sim.outcome import Outcome
from megatron_opd.sim.planner.bounds import Bounds
from megatron_opd.sim.planner.candidates import Candidate, Space
from megatron_opd.sim.planner.configs import SEARCHED, chosen_tree
from megatron_opd.sim.planner.costing import Costing, PlanTask, largest_bound, space_of
from megatron_opd.sim.planner.demand import Demand, Window
from megatron_opd.sim.planner.drawn_demand import demand_of
from megatron_opd.sim.planner.phases import (
    AverageSample,
    RunPhase,
    run_phases,
    running_requests,
)
from megatron_opd.sim.planner.result import MeasuredWindow, Plan
from megatron_opd.sim.planner.search import SearchResult, search
from megatron_opd.sim.planner.space import Losers, Pins
from megatron_opd.sim.world import simulate
from megatron_opd.sizing.gpus import CATALOGUE


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


def task_of(config: Config, gpus: int, gpu: Gpu, staleness: int | None, pins: Pins) -> PlanTask:
    """Check the input and read the models. Raises UserError."""
    roles = teacher_roles(config)
    node = config.cluster.ranks_per_node
    _check_plannable(config, gpus, node)
    bound = config.schedule.bound(config.buffer.batch_size)
    limit = bound if staleness is None else staleness
    if limit < 0:
        raise UserError(f"--staleness must be >= 0, got {limit}")
    models = read_models(config)
    check_support(config, models.student)
    check_context(config, models)
    teacher = next(((name, models.teachers[role].size) for name, role in roles.items()), None)
    return PlanTask(
        config=config,
        student=models.student.spec,
        teacher=teacher,
        hardware=CATALOGUE[gpu],
        gpus=gpus,
        node=node,
        staleness=limit,
        longest=longest_sample(config, models.student),
        contexts={
            role: section_of(config, role).context_length or facts.context_length
            for role, facts in models.served.items()
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
    task: PlanTask,
    gpu: Gpu,
    window: Window,
    trials: int | None = None,
    progress: Callable[[SearchResult], None] | None = None,
) -> Plan:
    """Find the front. trials: see search.search. Raises UserError."""
    began_s = time.monotonic()
    lengths = lengths_of(task.config)
    demand, losers = demand_of(task.config, lengths, window, task.staleness + 1), Losers()
    space = checked(lambda: space_of(task, demand, losers))
    bounds = bounds_of(task, demand, space)
    run = simulator(task, demand, gpu, lengths)
    found = search(space, bounds, run, most=trials, progress=progress)
    times = winner_phases(task, gpu, demand, found.front[-1].candidate)
    return Plan(task, gpu, demand, space, losers, found, times, time.monotonic() - began_s)


def winner_phases(
    task: PlanTask, gpu: Gpu, demand: Demand, candidate: Candidate
) -> dict[str, RunPhase]:
    """Return what each phase of a candidate takes, with as many rollouts as its servers hold."""
    config, sync = config_of(task, candidate, gpu), Costing(task).costs(candidate).sync
    running = min(
        running_requests(config, task.student, demand.mean),
        candidate.schedule.permits / candidate.servers,
    )
    sample = AverageSample(
        prompt=round(float(demand.prompt_N.mean())),
        response=round(float(demand.response_N.mean())),
        running=running,
    )
    teacher = None if task.teacher is None else task.teacher[1]
    return run_phases(config, (task.student, teacher), sample, sync, task.hardware)


def bounds_of(task: PlanTask, demand: Demand, space: Space) -> Bounds:
    """Return the bounds that hold for every candidate of a space."""
    overlaps = task.config.weight_sync.overlap
    return Bounds(demand, spare=largest_bound(space.schedules), overlaps=overlaps)


def simulator(
    task: PlanTask, demand: Demand, gpu: Gpu, lengths: Lengths
) -> Callable[[Candidate], MeasuredWindow]:
    """Return what simulates a candidate."""
    costing = Costing(task)

    def run(candidate: Candidate) -> MeasuredWindow:
        config = config_of(task, candidate, gpu)
        costs = checked(lambda: costing.costs(candidate))
        updates = demand.window.updates(candidate.schedule.permits, demand.batch_size)
        section = config.run.model_copy(update={"max_steps": updates})
        simulation = config.simulation.model_copy(update={"failures": None})
        short = config.model_copy(update={"run": section, "simulation": simulation})
        return measured(simulate(short, costs, lengths), demand)

    return run


def measured(outcome: Outcome, demand: Demand) -> MeasuredWindow:
    """Return the seconds of the window. They are of the tokens that the bounds are of."""
    done = outcome.totals.throughput.updates
    window = demand.window
    tokens = sum(count for count, _ in done[window.first : window.last])
    assert tokens == demand.tokens, "the simulation trained other samples than the bounds are of"
    return MeasuredWindow(done[window.last - 1][1] - done[window.first - 1][1], outcome.busy)


def config_of(task: PlanTask, candidate: Candidate, gpu: Gpu) -> Config:
    """Return a candidate's configuration."""
    return validate(Config, chosen_tree(task.config, candidate, gpu, task.memory_gib), "opd plan")
