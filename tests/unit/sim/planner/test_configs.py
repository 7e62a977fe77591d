"""The configuration of a candidate is one that can run."""

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.sim.planner.candidates import Candidate
from megatron_opd.sim.planner.configs import chosen_tree
from tests.support.config_files import minimal
from tests.support.search_cases import SCHEDULES, space_of


@pytest.mark.parametrize(("every", "expected"), [(0, 0), (1, 2), (2, 2), (5, 6)])
def test_evaluations_fall_on_weight_syncs(every: int, expected: int) -> None:
    space = space_of(4)
    windowed = SCHEDULES[3]
    assert windowed.config.sync_every == 2
    candidate = Candidate(
        learner=space.learners[0],
        student=space.students[0],
        servers=1,
        teacher=space.teachers[0],
        teachers=1,
        schedule=windowed,
        concurrency=8,
        scoring=8,
    )
    config = minimal(evaluation={"every": every}, buffer={"batch_size": 8})
    found = Config.model_validate(chosen_tree(config, candidate, "h100", 80.0))
    assert (found.schedule.sync_every, found.evaluation.every) == (2, expected)
