"""Makes the space of a search, and what each candidate costs, from a GPU's data sheet."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sim.costs import Costs, SyncCost
from megatron_opd.sim.hardware import (
    NETWORK_S,
    engine_cost,
    learner_cost,
    least_sync_cost,
    score_cost,
    sync_cost,
)
from megatron_opd.sim.learner import update_seconds
from megatron_opd.sim.planner.candidates import (
    Candidate,
    LearnerSize,
    ScheduleChoice,
    Space,
    StudentSize,
    Teacher,
)
from megatron_opd.sim.planner.demand import Demand
from megatron_opd.sim.planner.space import Losers, Pins, layouts, learners, schedules, servers
from megatron_opd.sizing.gpus import Hardware
from megatron_opd.sizing.learner import learner_memory, worst_stage
from megatron_opd.sizing.served import ModelSize, Sized
from megatron_opd.sizing.servers import server_memory


class NoSplit(ValueError):
    """Reports in one line why no split of the GPUs is possible."""


@dataclass(frozen=True, slots=True)
class PlanTask:
    """Describes what a search is asked for.

    teacher: name and model; None where the run has none. node: GPUs of a node. longest: tokens of
    the longest sample of a run. contexts: tokens that one request may take, by section.
    """

    config: Config
    student: ModelSpec
    teacher: tuple[str, ModelSize] | None
    hardware: Hardware
    gpus: int
    node: int
    staleness: int
    longest: int
    contexts: dict[str, int]
    pins: Pins = field(default_factory=Pins)

    @property
    def memory_gib(self) -> float:
        """Returns the memory of a GPU."""
        return self.hardware.memory_gib


class Costing:
    """Predicts what candidates cost."""

    def __init__(self, task: PlanTask) -> None:
        self._task = task
        self._syncs: dict[tuple[ParallelConfig, int, int], SyncCost] = {}

    def costs(self, candidate: Candidate) -> Costs:
        """Return the costs of one candidate. ValueError: its weight sync has no plan."""
        teachers = {}
        if self._task.teacher is not None:
            assert candidate.teacher is not None, "a space with a teacher has its sizes"
            teachers = {self._task.teacher[0]: candidate.teacher.cost}
        return Costs(
            engine=candidate.student.cost,
            teachers=teachers,
            learner=candidate.learner.cost,
            sync=self._sync(candidate),
            network_s=NETWORK_S,
        )

    def _sync(self, candidate: Candidate) -> SyncCost:
        key = candidate.learner.parallel, candidate.student.tp, candidate.servers
        if key not in self._syncs:
            config, size = self._task.config, candidate.student
            section = config.student.model_copy(
                update={"tp": size.tp, "ep": size.ep, "servers": candidate.servers}
            )
            learner = config.learner.model_copy(update={"parallel": candidate.learner.parallel})
            made = config.model_copy(update={"student": section, "learner": learner})
            self._syncs[key] = sync_cost(self._task.student, made, self._task.hardware)
        return self._syncs[key]


def space_of(task: PlanTask, demand: Demand, losers: Losers) -> Space:
    """List all sizes that fit. NoSplit: a part fits nowhere, or there is no room for all parts."""
    config, pins = task.config, task.pins
    found, beyond = schedules(config, pins, task.staleness, losers)
    if not found:
        least = "none of its types is possible" if beyond is None else f"the least is {beyond}"
        raise NoSplit(
            f"--staleness {task.staleness} leaves no schedule: with the keys that are kept {least}"
        )
    students = tuple(
        _student(task, sized, demand) for sized in _sizes(task, "student", task.student, losers)
    )
    teachers: tuple[Teacher, ...] = ()
    if task.teacher is not None:
        # larger ones score no more tokens with as many GPUs
        size = _sizes(task, "teacher", task.teacher[1], losers)[0]
        cost = score_cost(task.teacher[1], size, task.hardware)
        teachers = (Teacher(size.tp, size.ep, cost),)
    fewest = min(s.tp for s in students) * (
        config.student.servers if "student.servers" in pins else 1
    )
    if teachers:
        fewest += min(t.tp for t in teachers) * (
            config.teacher.servers if config.teacher and "teacher.servers" in pins else 1
        )
    chosen = _learners(task, demand, task.gpus - fewest, losers)
    if not chosen:
        raise NoSplit(_no_learner(task, fewest, losers))
    pinned = config.rollout.concurrency if "rollout.concurrency" in pins else None
    space = Space(
        gpus=task.gpus,
        learners=chosen,
        students=students,
        teachers=teachers,
        schedules=found,
        shares=(1.0,) if pinned else (1.0, 0.5),
        concurrency=pinned,
        servers=config.student.servers if "student.servers" in pins else None,
        scorers=_kept_scorers(task),
        scoring=config.scoring.concurrency,
        fixed_scoring="scoring.concurrency" in pins,
    )
    if next(space.all(), None) is None:
        raise NoSplit(
            f"--gpus {task.gpus}: no split holds learner and servers of the sizes that fit: "
            f"student {_tps(students)}, teacher {_tps(teachers)}, learner "
            f"{', '.join(str(each.gpus) for each in chosen)} GPUs"
        )
    return space


def _tps(sizes: tuple[StudentSize, ...] | tuple[Teacher, ...]) -> str:
    return f"tp {', '.join(str(size.tp) for size in sizes)}" if sizes else "none"


def _kept_scorers(task: PlanTask) -> int | None:
    teacher = task.config.teacher
    if teacher is None or "teacher.servers" not in task.pins:
        return None
    return teacher.servers


def _sizes(task: PlanTask, key: str, model: Sized, losers: Losers) -> list[ServerConfig]:
    section = task.config.student if key == "student" else task.config.teacher
    assert section is not None, "a run with a teacher has its section"
    node = min(task.node, task.gpus)
    found = servers(
        key, section, model, task.pins, task.memory_gib, task.contexts[key], node, losers
    )
    if found:
        return found
    reason = losers.reasons.get(f"{key} server does not fit", "")
    raise NoSplit(
        f"--gpus {task.gpus}: no {key} server fits within a node of {node} GPUs of "
        f"{task.memory_gib:g} GiB ({reason or f'{key}.tp does not divide the model'}); take "
        f"larger GPUs, or lower {key}.context_length"
    )


def _student(task: PlanTask, section: ServerConfig, demand: Demand) -> StudentSize:
    memory = server_memory(task.student, section)
    config = task.config.model_copy(update={"student": section})
    return StudentSize(
        tp=section.tp,
        ep=section.ep,
        cost=engine_cost(task.student, section, task.hardware),
        sync=least_sync_cost(task.student, config, task.hardware),
        in_flight=max(1, (memory.kv_tokens or 0) // demand.mean),
    )


def _learners(task: PlanTask, demand: Demand, most: int, losers: Losers) -> tuple[LearnerSize, ...]:
    config, spec = task.config, task.student

    def cost(section: LearnerConfig) -> LearnerSize:
        made = config.model_copy(update={"learner": section})
        worst = worst_stage(learner_memory(spec, section, task.longest)).total
        return LearnerSize(section.parallel, learner_cost(spec, made, task.hardware), worst)

    def update_s(learner: LearnerSize) -> float:
        last = demand.window.last
        return update_seconds(demand.batch(last), learner.cost, demand.mini_batches)

    found = layouts(config, spec, task.pins, gpus=most, node=task.node)
    return learners(config, spec, found, cost, update_s, task.longest, task.memory_gib, losers)


def _no_learner(task: PlanTask, fewest: int, losers: Losers) -> str:
    reason = losers.reasons.get("learner layout does not fit")
    room = task.gpus - fewest
    start = f"--gpus {task.gpus} leaves {room} for the learner beside {fewest} of servers: "
    if room < 1:
        return (
            f"--gpus {task.gpus}: servers alone take {fewest}, which leaves none for the learner; "
            "take more GPUs"
        )
    if reason is None:
        return f"{start}no learner.parallel of so few ranks divides model and batch"
    least = task.config.learner.recompute == "full"
    remedy = "" if least else ", or set learner.recompute full"
    return f"{start}no layout fits, {reason}; take more GPUs{remedy}"


def largest_bound(schedules: tuple[ScheduleChoice, ...]) -> int:
    """Return the largest bound on staleness of any schedule."""
    return max(schedule.bound for schedule in schedules)
