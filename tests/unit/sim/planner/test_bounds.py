"""What a candidate is bounded by from below is never more than what its simulation takes."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_opd.sim.costs import (
    EngineCost,
    LognormalLengths,
    LognormalTurns,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.planner.candidates import Candidate, LearnerSize, ScheduleChoice, Teacher
from megatron_opd.sim.planner.quick import STAGES, Quick
from tests.support.search_cases import (
    SCHEDULES,
    bounds_of,
    config_of,
    demand_for,
    learner_of,
    schedule_of,
    simulator,
    space_of,
    student_of,
)

SLACK = 1e-9
seconds = st.sampled_from([0.0, 1e-4, 0.003, 0.05, 1.0])


@st.composite
def engines(draw: st.DrawFn) -> EngineCost:
    return EngineCost(
        step_s=draw(st.sampled_from([1e-3, 0.02, 0.3])),
        step_request_s=draw(seconds) / 10,
        step_cached_token_s=draw(seconds) / 1000,
        prefill_token_s=draw(seconds) / 100,
        request_s=draw(seconds) / 10,
        max_running=draw(st.sampled_from([1, 3, 64])),
        cache_tokens=draw(st.sampled_from([None, 60, 400])),
    )


@st.composite
def syncs(draw: st.DrawFn) -> SyncCost:
    sync_s = draw(st.sampled_from([0.0, 0.3, 4.0]))
    return SyncCost(
        sync_s=sync_s,
        paused_s=sync_s * draw(st.sampled_from([0.0, 0.4, 1.0])),
        held_s=sync_s * draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    schedule = draw(st.sampled_from(SCHEDULES))
    learner = learner_of(
        draw(st.sampled_from([1, 2, 4])),
        update_s=draw(seconds),
        token_s=draw(seconds) / 10,
        token_context_s=draw(seconds) / 1000,
    )
    score = ScoreCost(request_s=draw(seconds), token_s=draw(seconds) / 100, max_running=4)
    return Candidate(
        learner=learner,
        student=student_of(1, draw(engines()), draw(syncs())),
        servers=draw(st.integers(1, 5)),
        teacher=Teacher(1, 1, score),
        teachers=draw(st.integers(1, 3)),
        schedule=schedule,
        concurrency=draw(st.sampled_from([1, 5, 8, 100])),
        scoring=draw(st.sampled_from([1, 16])),
    )


def following(update_s: float, sync_s: float) -> Candidate:
    """The next weight sync begins at the moment at which the one before lets samples be admitted.

    Unless weight syncs do not overlap and updates take time.
    """
    return Candidate(
        learner=learner_of(1, update_s=update_s, token_s=0.0),
        student=student_of(
            1,
            EngineCost(step_s=0.02, max_running=64),
            SyncCost(sync_s=sync_s, paused_s=0.0, held_s=0.0),
        ),
        servers=1,
        teacher=Teacher(1, 1, ScoreCost(max_running=4)),
        teachers=1,
        schedule=schedule_of("step_off", max_staleness=1.0),
        concurrency=100,
        scoring=1,
    )


@settings(max_examples=150, deadline=None)
@example(following(0.0, 0.0), True, 0.0, 1)
@example(following(0.0, 0.0), False, 0.0, 1)
@example(following(1e-5, 0.3), True, 0.0, 1)
@given(candidates(), st.booleans(), st.sampled_from([0.0, 0.8, 2.0]), st.sampled_from([1, 2]))
def test_no_simulation_is_faster_than_the_bound(
    candidate: Candidate, overlap: bool, cv: float, mini_batches: int
):
    lengths = LognormalLengths(mean=30, cv=cv, prompt_tokens=10)
    check_bound(candidate, lengths, overlap, mini_batches)


@settings(max_examples=60, deadline=None)
@example(following(0.05, 0.3), False, 0.0, 5.0, 1.0)  # its weight sync waits for turns alone
@given(
    candidates(),
    st.booleans(),
    st.sampled_from([0.0, 0.8, 2.0]),
    st.sampled_from([0.0, 0.2, 5.0]),
    st.sampled_from([0.0, 1.0]),
)
def test_no_simulation_of_trajectories_is_faster_than_the_bound(
    candidate: Candidate, overlap: bool, cv: float, answer_s: float, spread: float
):
    """Some are cut by a limit; 30 tokens of a turn and 4 turns in 160 tokens."""
    turns = LognormalTurns(mean=2.5, cv=spread, given_tokens=5, answer_s=answer_s, answer_cv=spread)
    lengths = LognormalLengths(mean=30, cv=cv, prompt_tokens=10, turns=turns)
    check_bound(candidate, lengths, overlap, 1)


def check_bound(candidate: Candidate, lengths: LognormalLengths, overlap: bool, mini_batches: int):
    plays = lengths.turns is not None
    config = config_of(overlap=overlap, mini_batches=mini_batches, plays=plays)
    demand = demand_for(config, lengths)
    bounds = bounds_of(config, demand)
    simulated_s = simulator(config, demand, lengths)(candidate).seconds
    each = candidate.schedule
    alone = (
        bounds.quick_learner(candidate.learner, candidate.student, each),
        bounds.quick_student(candidate.student, candidate.servers, candidate.concurrency, each),
        bounds.quick_teacher(teacher_of(candidate), candidate.teachers, candidate.scoring, each),
        bounds.seconds(candidate),
    )
    assert max(alone) <= simulated_s * (1 + SLACK) + 1e-6, alone


def teacher_of(candidate: Candidate) -> Teacher:
    assert candidate.teacher is not None
    return candidate.teacher


def test_the_bound_of_all_stages_is_no_less_than_that_of_each():
    config = config_of()
    bounds = bounds_of(config, demand_for(config))
    quick = Quick(space_of(6), bounds)
    for candidate in space_of(6).all():
        assert quick.stage(candidate) in STAGES
        learner_s = bounds.quick_learner(candidate.learner, candidate.student, candidate.schedule)
        assert bounds.seconds(candidate) >= learner_s * (1 - SLACK)


@pytest.mark.parametrize(
    ("learner", "step_s", "kind", "least"),
    [
        # a learner that never waits; one after the other; servers that never wait
        (learner_of(1, update_s=60.0), 0.01, schedule_of("async", max_staleness=2.0), 0.97),
        (learner_of(1, update_s=60.0), 0.01, schedule_of("sync"), 0.97),
        (learner_of(4, token_s=1e-5), 1.0, schedule_of("async", max_staleness=1.0), 0.5),
    ],
)
def test_the_bound_is_near_where_one_stage_is_all(
    learner: LearnerSize, step_s: float, kind: ScheduleChoice, least: float
):
    config = config_of()
    demand = demand_for(config)
    candidate = Candidate(
        learner=learner,
        student=student_of(1, EngineCost(step_s=step_s), SyncCost(sync_s=0.0, paused_s=0.0)),
        servers=1,
        teacher=Teacher(1, 1, ScoreCost()),
        teachers=1,
        schedule=kind,
        concurrency=100,
        scoring=16,
    )
    bound_s = bounds_of(config, demand).seconds(candidate)
    assert bound_s >= least * simulator(config, demand)(candidate).seconds


def without_teacher(
    schedule: ScheduleChoice, token_s: float, step_s: float, servers: int
) -> Candidate:
    return Candidate(
        learner=learner_of(4, update_s=0.1, token_s=token_s),
        student=student_of(1, EngineCost(step_s=step_s), SyncCost(sync_s=0.0, paused_s=0.0)),
        servers=servers,
        teacher=None,
        teachers=0,
        schedule=schedule,
        concurrency=100,
        scoring=16,
    )


@pytest.mark.parametrize(
    ("kind", "spread", "least"),
    [
        # all at once, so the slowest; permits of two batches, which are under way for two updates
        (schedule_of("sync"), 1.0, 0.9),
        (schedule_of("async", max_staleness=1.0), 0.0, 0.5),
    ],
)
def test_the_bound_knows_how_long_environments_answer(
    kind: ScheduleChoice, spread: float, least: float
):
    config = config_of(plays=True)
    turns = LognormalTurns(mean=3, given_tokens=5, answer_s=20.0, answer_cv=spread)
    lengths = LognormalLengths(mean=30, prompt_tokens=10, turns=turns)
    demand = demand_for(config, lengths)
    candidate = without_teacher(kind, token_s=1e-5, step_s=0.01, servers=1)
    bound_s = bounds_of(config, demand).seconds(candidate)
    simulated_s = simulator(config, demand, lengths)(candidate).seconds
    assert least * simulated_s <= bound_s <= simulated_s * (1 + SLACK)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.config.type}-{each.bound}")
def test_responses_that_outlast_weight_syncs_keep_within_the_bound(schedule: ScheduleChoice):
    """Only with in_flight keep does a weight sync wait for them."""
    config = config_of()
    lengths = LognormalLengths(mean=30, cv=2.0, prompt_tokens=10)
    demand = demand_for(config, lengths)
    candidate = without_teacher(schedule, token_s=1e-4, step_s=0.1, servers=5)
    bound_s = bounds_of(config, demand).seconds(candidate)
    assert bound_s <= simulator(config, demand, lengths)(candidate).seconds * (1 + SLACK)
