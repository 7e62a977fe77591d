"""Small spaces with made-up costs for tests of the search, and what simulates their candidates."""

from collections.abc import Callable

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.config.schema import Config
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    LognormalLengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.planner.bounds import Bounds
from megatron_opd.sim.planner.candidates import (
    Candidate,
    LearnerSize,
    ScheduleChoice,
    Space,
    StudentSize,
    Teacher,
)
from megatron_opd.sim.planner.configs import chosen_tree
from megatron_opd.sim.planner.demand import Demand, Window
from megatron_opd.sim.planner.drawn_demand import demand_of
from megatron_opd.sim.planner.plan import measured
from megatron_opd.sim.planner.result import MeasuredWindow
from megatron_opd.sim.world import simulate
from tests.support.config_files import MINIMAL

BATCH, WINDOW, AHEAD = 8, Window(3, 7), 4
LENGTHS = LognormalLengths(mean=30, cv=0.8, prompt_tokens=10)
SYNC = SyncCost(sync_s=0.5, paused_s=0.2)
ENGINE = EngineCost(
    step_s=0.1,
    step_request_s=0.01,
    step_cached_token_s=1e-4,
    prefill_token_s=1e-3,
    request_s=0.01,
    max_running=16,
)
PLAYS = {
    "data": MINIMAL["data"] | {"chat_template": True},
    "environment": {"type": "guess", "max_turns": 4, "max_tokens": 160},
}
SCORE = ScoreCost(request_s=0.02, token_s=0.01)


def config_of(*, overlap: bool = False, mini_batches: int = 1, plays: bool = False) -> Config:
    """A configuration whose batches are small. plays: with an environment."""
    sync = {"type": "shards", "overlap": overlap}
    return Config.model_validate(
        MINIMAL
        | {
            "buffer": {"batch_size": BATCH},
            "rollout": {"max_new_tokens": 100},
            "learner": {"num_mini_batches": mini_batches},
            "weight_sync": sync,
        }
        | (PLAYS if plays else {})
    )


def schedule_of(kind: str, **keys: object) -> ScheduleChoice:
    """A schedule with its bound and permits."""
    tree = {"type": kind, **keys}
    config = Config.model_validate(MINIMAL | {"schedule": tree}).schedule
    return ScheduleChoice(config, config.bound(BATCH), config.permits(BATCH))


SCHEDULES = (
    schedule_of("sync"),
    schedule_of("async", max_staleness=1.0),
    schedule_of("step_off", max_staleness=1.0),
    schedule_of("stream", sync_every=2),
    schedule_of("async", max_staleness=2.0),
    schedule_of("partial", sync_every=2, max_staleness=0.5),
    schedule_of("stale", sync_every=2, max_staleness=0.5),
    schedule_of("controlled", max_staleness=1.0),
)


def learner_of(ranks: int, **cost: float) -> LearnerSize:
    """A learner of so many data-parallel ranks."""
    given = {"update_s": 0.5, "token_s": 0.02} | cost
    return LearnerSize(ParallelConfig(dp=ranks), LearnerCost(**given, ranks=ranks))


def student_of(tp: int, cost: EngineCost = ENGINE, sync: SyncCost = SYNC) -> StudentSize:
    """A student server."""
    return StudentSize(tp, 1, cost, sync, in_flight=12)


def space_of(gpus: int) -> Space:
    """All splits of a few GPUs, with two sizes of student servers."""
    faster = EngineCost(step_s=0.06, step_request_s=0.006, step_cached_token_s=5e-5, max_running=16)
    return Space(
        gpus=gpus,
        learners=tuple(learner_of(ranks) for ranks in (1, 2, 4)),
        students=(student_of(1), student_of(2, faster)),
        teachers=(Teacher(1, 1, SCORE),),
        schedules=SCHEDULES[:6],
    )


def bounds_of(config: Config, demand: Demand) -> Bounds:
    """Bounds that hold for SCHEDULES."""
    return Bounds(demand, spare=3, overlaps=config.weight_sync.overlap)


def demand_for(config: Config, lengths: LognormalLengths = LENGTHS) -> Demand:
    """What all candidates are asked for."""
    return demand_of(config, lengths, WINDOW, AHEAD)


def simulator(
    config: Config, demand: Demand, lengths: LognormalLengths = LENGTHS
) -> Callable[[Candidate], MeasuredWindow]:
    """Simulates candidates, each once."""
    known: dict[Candidate, MeasuredWindow] = {}

    def run(candidate: Candidate) -> MeasuredWindow:
        if candidate not in known:
            tree = chosen_tree(config, candidate, "h100", 80.0)
            updates = WINDOW.updates(candidate.schedule.permits, BATCH)
            tree["run"] = {"max_steps": updates}
            teacher = candidate.teacher or Teacher(1, 1, ScoreCost())
            costs = Costs(
                engine=candidate.student.cost,
                teachers={"teacher": teacher.cost},
                learner=candidate.learner.cost,
                sync=candidate.student.sync,
            )
            known[candidate] = measured(
                simulate(Config.model_validate(tree), costs, lengths), demand
            )
        return known[candidate]

    return run
