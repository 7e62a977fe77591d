"""What a teacher that follows the student needs, refused in one line; which version it holds."""

from copy import deepcopy
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_opd.config.digests import value_digests
from megatron_opd.config.roles import (
    STUDENT,
    answering,
    followers,
    gets_weights,
    run_roles,
    section_of,
    student_share,
)
from megatron_opd.config.schema import Config
from tests.support.config_files import MINIMAL

EMA = {"type": "ema", "decay": 0.9}
URL = "http://127.0.0.1:7001"


def tree(source: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    found = deepcopy(MINIMAL)
    found["teacher"] = {"model": found["student"]["model"]}
    if source is not None:
        found["teacher"]["source"] = source
    for key, value in changes.items():
        found[key] = {**found.get(key, {}), **value}
    return found


@pytest.mark.parametrize("source", [{"type": "student"}, {"type": "lagged", "every": 2}, EMA])
def test_a_teacher_that_follows_gets_weights(source: dict[str, Any]):
    config = Config.model_validate(tree(source))
    assert list(followers(config)) == ["teacher"]
    assert gets_weights(config, "teacher")
    assert gets_weights(config, "student")


def test_a_checkpoint_s_teacher_gets_none():
    config = Config.model_validate(tree(None))
    assert followers(config) == {}
    assert not gets_weights(config, "teacher")
    assert config == Config.model_validate(tree({"type": "checkpoint"})), "today's default"


@pytest.mark.parametrize(
    ("source", "versions"),
    [
        ({"type": "student"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"type": "lagged", "every": 3}, [0, 0, 0, 3, 3, 3, 6, 6]),
        (EMA, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({**EMA, "every": 2}, [0, 0, 2, 2, 4, 4, 6, 6]),
    ],
)
def test_the_version_after_so_many_updates(source: dict[str, Any], versions: list[int]):
    config = Config.model_validate(tree(source))
    assert config.teacher is not None
    assert [config.teacher.source.version_at(updates) for updates in range(8)] == versions


REFUSED = [
    ({"teacher": {"model": "other"}}, "teacher.model must be "),
    ({"teacher": {"quantization": "int8"}}, "teacher.quantization must be null"),
    ({"weight_sync": {"type": "broadcast"}}, "weight_sync.type must be shards"),
    (
        {
            "sites": {"members": {"far": {}}},
            "weight_sync": {"type": "disk", "directory": "/weights"},
            "evaluation": {"problems": 0},
        },
        "weight_sync.type must be shards",
    ),
    (
        {
            "teacher": {"urls": [URL]},
            "teachers": {"other": {"model": "other", "urls": [URL]}},
            "data": {"teacher_key": "who"},
        },
        "teacher.urls and teachers.other.urls must name different servers",
    ),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_does_not_suit_is_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ValidationError) as refused:
        Config.model_validate(tree(EMA, **changes))
    (error,) = refused.value.errors()
    assert said in error["msg"]
    assert "teacher.source.type ema" in error["msg"]
    assert ", got " in error["msg"]
    assert "\n" not in error["msg"]


@pytest.mark.parametrize("decay", [0, 1, -0.1, 1.5])
def test_a_decay_lies_between_0_and_1(decay: float):
    with pytest.raises(ValidationError, match=r"teacher\.source\.ema\.decay"):
        Config.model_validate(tree({"type": "ema", "decay": decay}))


def test_a_learner_with_another_decay_is_not_the_same():
    one, other = (
        value_digests(Config.model_validate(tree({**EMA, "decay": decay}))) for decay in (0.9, 0.99)
    )
    assert {key for key in one if one[key] != other[key]} == {"teacher.source.decay"}


SHARED = {"type": "student", "share": 0.25}


def test_the_student_s_servers_score_for_a_teacher_with_a_share():
    config = Config.model_validate(tree(SHARED))
    assert answering(config) == {"teacher": STUDENT}
    assert run_roles(config) == (STUDENT,)
    assert list(config.served) == [STUDENT]
    assert section_of(config, "teacher") is config.student
    assert followers(config) == {}
    assert not gets_weights(config, "teacher")
    assert student_share(config) == 0.25
    assert student_share(Config.model_validate(tree({"type": "student"}))) is None
    broadcast = tree(SHARED, weight_sync={"type": "broadcast"})
    assert Config.model_validate(broadcast), "no weights are sent to it"
    resolved = config.model_dump(mode="json")
    assert Config.model_validate(resolved) == config, "what a run keeps is read again"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": {"model": "other"}}, "teacher.model must be "),
        ({"teacher": {"urls": [URL]}}, "teacher.urls must be left out"),
        ({"teacher": {"tp": 2}}, "teacher.tp must be left out"),
        ({"teacher": {"dtype": "float32"}}, "teacher.dtype must be left out"),
        ({"sites": {"members": {"far": {}}}}, "sites.members must be empty"),
    ],
)
def test_a_teacher_with_a_share_has_no_servers(changes: dict[str, Any], said: str):
    if "sites" in changes:
        disk = {"type": "disk", "directory": "/weights"}
        changes = {**changes, "weight_sync": disk, "evaluation": {"problems": 0}}
    with pytest.raises(ValidationError) as refused:
        Config.model_validate(tree(SHARED, **changes))
    (error,) = refused.value.errors()
    assert said in error["msg"]
    assert "with teacher.source.share" in error["msg"]
    assert "got " in error["msg"]


def test_hints_are_not_measured_by_servers_that_sleep_while_the_learner_works():
    hinted = {"metrics": {"leak_every": 5}, "data": {"teacher_prompt_key": "hint"}}
    asleep = {"schedule": {"type": "sync", "time_shared": True}}
    assert Config.model_validate(tree(SHARED, **hinted))
    assert Config.model_validate(tree(None, **hinted, **asleep))
    with pytest.raises(ValidationError, match=r"leak_every must be 0 with .*share.* got 5"):
        Config.model_validate(tree(SHARED, **hinted, **asleep))


@pytest.mark.parametrize("share", [0, 1, -0.5, 2])
def test_a_share_lies_between_0_and_1(share: float):
    with pytest.raises(ValidationError, match=r"teacher\.source\.student\.share"):
        Config.model_validate(tree({**SHARED, "share": share}))
