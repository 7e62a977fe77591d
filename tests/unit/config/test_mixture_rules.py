"""scoring.mixture beside other keys: each refusal names keys, values and a remedy."""

import pytest
from pydantic import ValidationError

from megatron_opd.config.mixture_rules import most_draws
from tests.support.config_files import minimal

TEACHERS = {"math": {"model": "m"}, "code": {"model": "c"}}
MIXTURE = {"math": 0.7, "code": 0.3}
FORWARD = {"type": "forward_kl"}


def mixed(mixture=MIXTURE, teachers=TEACHERS, **tree):
    return minimal(teacher=None, teachers=teachers, scoring={"mixture": mixture}, **tree)


def test_mixtures_that_are_accepted():
    assert mixed().scoring.mixture == MIXTURE
    assert mixed({"math": 1, "code": 0}, support={"type": "teacher_topk"}, objective=FORWARD)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"mixture": {"math": 0.7, "law": 0.3}}, ["scoring.mixture", "law", "math, code"]),
        ({"mixture": {"math": 1.0}}, ["none for code", "leave that teacher out"]),
        ({"mixture": {"math": 0.7, "code": 0.7}}, ["got 1.4", "{math: 0.5, code: 0.5}"]),
        ({"mixture": {"math": 1.7, "code": -0.7}}, ["finite and >= 0", "code: -0.7"]),
        (
            {"data": {"train": "t.jsonl", "teacher_key": "who"}},
            ["scoring.mixture must be left out with data.teacher_key", "got who"],
        ),
        (
            {"support": {"type": "teacher_topk"}, "objective": FORWARD},
            ["support.type", "teacher_topk", "use teacher_mc"],
        ),
        ({"metrics": {"health_every": 5}}, ["metrics.health_every must be 0", "got 5"]),
        (
            {
                "metrics": {"leak_every": 5},
                "data": {"train": "t.jsonl", "teacher_prompt_key": "hint"},
            },
            ["metrics.leak_every must be 0 with scoring.mixture", "got 5"],
        ),
        (
            {
                "teachers": {},
                "mixture": {"math": 1.0},
                "objective": {"type": "grpo"},
                "rollout": {"group_size": 2},
                "data": {"train": "t.jsonl", "task": "math"},
            },
            ["scoring.mixture has no effect", "grpo", "leave it out"],
        ),
    ],
)
def test_mixtures_that_are_refused(tree, said):
    with pytest.raises(ValidationError) as caught:
        mixed(**tree)
    for words in said:
        assert words in str(caught.value)


def test_the_cache_of_a_mixture_has_room_for_a_draw_of_each_teacher_more():
    drawn = {"support": {"type": "teacher_mc", "m": 16}, "objective": FORWARD}
    assert most_draws(mixed(**drawn)) == 17
    assert most_draws(mixed()) == 64, "the student's ids are drawn once"
    assert most_draws(minimal(**drawn)) == 16
