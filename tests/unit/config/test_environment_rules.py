"""What a run with an environment refuses, in one line that names key, rule, value and remedy."""

import pytest
from pydantic import ValidationError

from megatron_opd.config.schema import Config
from megatron_opd.controller.schedule import make_schedule
from tests.support.config_files import MINIMAL, minimal

GUESSING = {
    "data": MINIMAL["data"] | {"chat_template": True},
    "environment": {"type": "guess"},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": MINIMAL["data"]}, "data.chat_template must be True with section environment"),
        ({"schedule": {"in_flight": "keep"}}, "schedule.in_flight must be in_place with section"),
        ({"workers": {"count": 2}}, "workers.count must be 0 with section environment"),
        ({"evaluation": {"problems": 4}}, "evaluation.problems must be 0 with section environment"),
    ],
)
def test_what_it_does_not_do_is_refused(changes: dict, words: str):
    minimal(**GUESSING)
    with pytest.raises(ValidationError) as refused:
        minimal(**(GUESSING | changes))
    (error,) = refused.value.errors()
    assert words in error["msg"]
    assert "\n" not in error["msg"]


def test_a_resolved_configuration_is_one_again():
    config = minimal(**GUESSING)
    assert Config.model_validate(config.model_dump()) == config


def test_evaluations_are_off_unless_a_file_says_otherwise():
    assert minimal(**GUESSING).evaluation.problems == 0
    assert minimal().evaluation.problems > 0


def test_waiting_trajectories_take_no_slots_of_the_schedule():
    slots = {"rollout": {"concurrency": 3}}
    assert make_schedule(minimal(**GUESSING, **slots)).rollout_slots > 10**6
    assert make_schedule(minimal(**slots)).rollout_slots == 3
