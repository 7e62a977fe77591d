"""What learning the teacher's own answers does not go together with, and what it asks of a run."""

from fractions import Fraction
from typing import Any

import pytest

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.roles import teacher_roles
from tests.support.config_files import MINIMAL, minimal

ALONE = {"type": "sft_on_teacher"}
FOREIGN = {"model": "m", "urls": ["http://127.0.0.1:1"], "api": "chat"}


def mixture(**keys: Any) -> dict[str, Any]:
    terms = [{"objective": ALONE | keys}, {"objective": {"type": "reverse_kl"}}]
    return {"type": "mixture", "terms": terms}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workers": {"count": 2}}, "workers.count must be 0 .*got 2"),
    (
        {"data": {"train": "t", "curriculum": {"type": "pass_rate"}, "task": "exact"}},
        "data.curriculum must be null",
    ),
    (
        {"objective": mixture(), "scoring": {"alignment": {}}, "support": {"type": "path"}},
        "scoring.alignment must be null .*got an alignment",
    ),
    (
        {"teacher": {"model": "student", "source": {"type": "student"}}},
        "teacher.source.type must be checkpoint .*got student",
    ),
    ({"learner": {"routing_replay": "rollout"}}, "learner.routing_replay must be off"),
    (
        {
            "objective": {
                "type": "mixture",
                "terms": [{"objective": ALONE}, {"objective": {"type": "grpo"}}],
            },
            "selection": {"groups": {"type": "reward_spread"}},
            "rollout": {"group_size": 2},
            "data": {"train": "t", "task": "exact", "teacher_weight_key": "w"},
        },
        "selection.groups.type must be all .*got reward_spread",
    ),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_it_is_refused_by_name(changed: dict[str, Any], words: str):
    minimal(objective=ALONE)
    with pytest.raises(ValueError, match=words):
        minimal(**({"objective": ALONE} | changed))


def test_it_needs_a_teacher_and_asks_it():
    without = {key: value for key, value in MINIMAL.items() if key != "teacher"}
    with pytest.raises(ValueError, match=r"missing key 'teacher': .*learns what it writes"):
        minimal(objective=ALONE, teacher=None)
    assert "teacher" not in without
    config = minimal(objective=ALONE)
    assert teacher_roles(config) == {"teacher": "teacher"}
    assert not config.estimator.reads_teacher
    assert config.support is None


def test_which_share_the_teacher_answers():
    assert Estimator.model_validate({"objective": ALONE}).imitated_share == 1
    assert Estimator.model_validate({"objective": mixture()}).imitated_share == Fraction(1, 2)
    assert Estimator.model_validate({"objective": mixture(share=0.1)}).imitated_share == Fraction(
        1, 10
    )
    assert Estimator.model_validate({}).imitated_share == 0


def test_a_teacher_that_scores_nothing_writes_alone():
    minimal(objective=ALONE, teacher=FOREIGN)
    with pytest.raises(ValueError, match=r"teacher.api must not be chat with .*sft_on_teacher"):
        minimal(objective=mixture(), teacher=FOREIGN, support={"type": "path"})
    rewarded = [{"objective": ALONE}, {"objective": {"type": "grpo"}}]
    minimal(
        objective={"type": "mixture", "terms": rewarded},
        teacher=FOREIGN,
        rollout={"group_size": 2},
        data={"train": "t", "task": "exact"},
    )
