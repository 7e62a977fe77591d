"""What a run with an environment refuses, in one line that names key, rule, value and remedy."""

import pytest
from pydantic import ValidationError

from megatron_opd.config.objective import CustomObjective
from megatron_opd.config.roles import teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.losses.formulas import formula
from tests.support.config_files import MINIMAL, minimal

GUESSING = {
    "data": MINIMAL["data"] | {"chat_template": True},
    "environment": {"type": "guess"},
}
HARD = {"file": "hard.jsonl", "max_new_tokens": 31}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": MINIMAL["data"]}, "data.chat_template must be True with section environment"),
        (
            {"data": GUESSING["data"] | {"continue_assistant": True}},
            "data.continue_assistant must be False with section environment",
        ),
        (
            {"workers": {"count": 2}, "environment": {"type": "user"}},
            "workers.count must be 0 with environment.type user",
        ),
        (
            {"evaluation": {"max_new_tokens": 600}, "rollout": {"max_new_tokens": 500}},
            "evaluation.max_new_tokens must be at most 500, the longest turn with section "
            "environment, got 600; raise environment.max_turn_tokens",
        ),
        (
            {
                "data": GUESSING["data"] | {"heldout": {"hard": HARD}},
                "environment": {"type": "guess", "max_turn_tokens": 30},
            },
            "data.heldout.hard.max_new_tokens must be at most 30",
        ),
    ],
)
def test_what_it_does_not_do_is_refused(changes: dict, words: str):
    minimal(**GUESSING)
    with pytest.raises(ValidationError) as refused:
        minimal(**(GUESSING | changes))
    (error,) = refused.value.errors()
    assert words in error["msg"]
    assert "\n" not in error["msg"]


USER = GUESSING | {"environment": {"type": "user"}}
REWARDS = {"objective": {"type": "grpo"}, "rollout": {"group_size": 4}}
SMALL = {"teachers": {"small": {"model": "small"}}}


def test_a_teacher_plays_the_user():
    """The first one, or that of a name; a run has it where it learns from rewards alone, too."""
    both = SMALL | USER
    named = both | {"environment": {"type": "user", "teacher": "small"}}
    assert minimal(**USER).user_teacher == "teacher"
    assert minimal(**named).user_teacher == "small"
    assert teacher_roles(minimal(**named)) == {"teacher": "teacher", "small": "teachers.small"}
    assert teacher_roles(minimal(**named, **REWARDS)) == {"small": "teachers.small"}
    assert teacher_roles(minimal(**GUESSING, **REWARDS)) == {}
    assert minimal(**GUESSING).user_teacher is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": None, **REWARDS}, "missing key 'teacher': environment.type user is played by"),
        (
            {"environment": {"type": "user", "teacher": "small"}},
            "environment.teacher must be one of 'teacher', got 'small'",
        ),
        (SMALL, "data.teacher_key must name the column"),
        (SMALL | REWARDS, "teachers has no effect"),
    ],
)
def test_a_user_without_a_teacher_is_refused(changes: dict, words: str):
    with pytest.raises(ValidationError) as refused:
        minimal(**(USER | changes))
    (error,) = refused.value.errors()
    assert words in error["msg"]


def test_a_resolved_configuration_is_one_again():
    config = minimal(**GUESSING)
    assert Config.model_validate(config.model_dump()) == config
    credited = by_turn({"type": "grpo"})
    assert Config.model_validate(credited.model_dump()) == credited
    assert credited.estimator.credit == "turn"
    assert config.estimator.credit == minimal().estimator.credit == "trajectory"


def by_turn(objective: dict, **changes: object) -> Config:
    data = GUESSING["data"] | {"task": "math"}
    guess = {"type": "guess", "credit": "turn"}
    parts = {"rollout": {"group_size": 2}, "objective": objective, "environment": guess}
    return minimal(data=data, **(parts | changes))


KL = {"type": "reverse_kl"}


@pytest.mark.parametrize("kind", ["reinforce", "ppo", "grpo", "gspo", "gepo"])
def test_every_objective_from_rewards_reads_those_of_turns(kind: str):
    assert by_turn({"type": kind}).estimator.credit == "turn"
    both = {"type": "mixture", "terms": [{"objective": KL}, {"objective": {"type": kind}}]}
    lines = dict(formula(by_turn(both).estimator))
    assert any("own turn" in text for label, text in lines.items() if label.endswith("credit"))


class Plain(CustomObjective):
    reads_reward = True

    def loss(self, estimator, cache, limit):
        raise NotImplementedError


class ByToken(Plain):
    reads_turns = True


@pytest.mark.parametrize(
    ("objective", "changes", "words"),
    [
        (KL, {}, "environment.credit must be trajectory with objective.type reverse_kl, which"),
        (
            {"type": f"{__name__}:Plain"},
            {"support": {"type": "path"}},
            f"environment.credit must be trajectory with objective.type {__name__}:Plain, whose",
        ),
        (
            {"type": "grpo"},
            {"selection": {"overlong": {"type": "soft_penalty", "cache": 8}}},
            "environment.credit must be trajectory with selection.overlong.type soft_penalty",
        ),
    ],
)
def test_rewards_of_turns_that_nothing_reads_are_refused(objective, changes, words: str):
    with pytest.raises(ValidationError) as refused:
        by_turn(objective, **changes)
    (error,) = refused.value.errors()
    assert words in error["msg"]
    assert "got turn; " in error["msg"]


def test_an_agent_has_one_reward():
    agent = {"type": "agent", "function": "mine.agents:run", "credit": "turn"}
    with pytest.raises(ValidationError, match="credit must be trajectory with type: agent"):
        by_turn({"type": "grpo"}, environment=agent)


def test_an_objective_of_ones_own_may_read_them():
    parts = {"support": {"type": "path"}}
    assert by_turn({"type": f"{__name__}:ByToken"}, **parts).estimator.credit == "turn"


def test_evaluations_are_as_without_one_and_turns_longer_than_those_of_rollouts_can_be_allowed():
    assert minimal(**GUESSING).evaluation == minimal().evaluation
    longer = {"type": "guess", "max_turn_tokens": 600}
    sizes = {"rollout": {"max_new_tokens": 500}, "evaluation": {"max_new_tokens": 600}}
    assert minimal(**GUESSING | sizes | {"environment": longer}).evaluation.max_new_tokens == 600


def test_rewards_need_no_verifier_where_an_environment_gives_them():
    rewarded = {"objective": {"type": "grpo"}, "rollout": {"group_size": 2}}
    data = GUESSING["data"] | {"task": "none"}
    assert minimal(**GUESSING | rewarded | {"data": data}).data.task == "none"
    with pytest.raises(ValidationError, match=r"data\.task must name a verifier"):
        minimal(**rewarded, data=data)


def test_waiting_trajectories_take_no_slots_of_the_schedule():
    slots = {"rollout": {"concurrency": 3}}
    assert make_schedule(minimal(**GUESSING, **slots)).rollout_slots > 10**6
    assert make_schedule(minimal(**slots)).rollout_slots == 3
