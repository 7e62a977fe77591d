"""Branch and bound finds what simulating every candidate finds."""

from dataclasses import replace

import pytest

from megatron_opd.sim.planner.candidates import Candidate, Teacher
from megatron_opd.sim.planner.search import Trial, front_of, search
from tests.support.search_cases import (
    SCORE,
    bounds_of,
    config_of,
    demand_for,
    simulator,
    space_of,
)


@pytest.mark.parametrize("gpus", [3, 4, 6])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_front_is_that_of_brute_force(gpus: int, overlap: bool):
    config, space = config_of(overlap=overlap), space_of(gpus)
    demand = demand_for(config)
    run, bounds = simulator(config, demand), bounds_of(config, demand)
    every = [Trial(each, bounds.seconds(each), run(each)) for each in space.all()]
    wanted = front_of(every)
    found = search(space, bounds, run)
    assert [(trial.candidate.schedule.bound, trial.measured.seconds) for trial in found.front] == [
        (trial.candidate.schedule.bound, trial.measured.seconds) for trial in wanted
    ]
    assert found.enumerated == len(every) == sum(found.limited.values())
    assert found.pruned + len(found.trials) == found.enumerated
    assert not found.unproven_s
    if gpus > 3:
        assert len(wanted) > 1
        assert len(found.trials) < len(every)


def test_a_search_that_is_stopped_says_what_it_left_open():
    config, space = config_of(), space_of(6)
    demand = demand_for(config)
    run, bounds = simulator(config, demand), bounds_of(config, demand)
    whole = search(space, bounds, run)
    told: list[int] = []
    found = search(space, bounds, run, most=1, progress=lambda now: told.append(len(now.trials)))
    assert told == list(range(1, len(found.trials) + 1))
    assert len(found.trials) == len({each.bound for each in space.schedules})
    assert found.unproven_s
    fastest = min(trial.measured.seconds for trial in whole.trials)
    assert min(found.unproven_s.values()) <= fastest


def test_a_split_leaves_no_room_for_another_server():
    space = replace(space_of(7), teachers=(Teacher(2, 1, SCORE),))
    left = {7 - sum(each.gpus) for each in space.all() if each.student.tp == 1}
    assert left == {0}
    left = {7 - sum(each.gpus) for each in space.all() if each.student.tp == 2}
    assert left == {0, 1}
    assert len({_key(each) for each in space.all()}) == sum(1 for _ in space.all())


def _key(candidate: Candidate) -> object:
    return (
        candidate.gpus,
        candidate.student.tp,
        candidate.schedule.config,
        candidate.concurrency,
    )
