"""scoring.alignment beside other keys: each refusal names keys, values and a remedy in one line."""

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_opd.config import schema
from megatron_opd.config.alignment_rules import ALIGNMENT_RULES
from megatron_opd.config.schema import Config
from tests.support.config_files import MINIMAL, minimal

DROP, CHUNK = {"alignment": {}}, {"alignment": {"unaligned": "chunk"}}
ROLLOUT = {"type": "reverse_kl", "advantage": "rollout"}
PATH = {"type": "path"}
GRPO = {"type": "grpo", "kl": {"coefficient": 0.1}}
REWARDED = {"data": {"train": "t.jsonl", "task": "math"}, "rollout": {"group_size": 2}}


def test_what_is_accepted():
    assert minimal(scoring=DROP).scoring.alignment is not None
    for objective in (
        {"type": "forward_kl"},
        {"type": "jsd"},
        {"type": "sparse_reverse_kl", "outside": "bucket"},
    ):
        assert minimal(scoring=DROP, objective=objective)
    assert minimal(scoring=DROP, support={"type": "exact"})
    assert minimal(scoring=CHUNK, objective=ROLLOUT, support=PATH)
    terms = [{"objective": ROLLOUT}, {"objective": {"type": "grpo"}}]
    mixture = {"type": "mixture", "terms": terms}
    assert minimal(scoring=CHUNK, objective=mixture, support=PATH, **REWARDED)


def test_the_teacher_s_own_template_is_taken_where_the_student_reads_one():
    data = {"train": "t.jsonl", "chat_template": True}
    found = minimal(scoring=DROP, data=data)
    assert found.teacher is not None
    assert found.teacher.chat_template is True
    told = minimal(scoring=DROP, data=data, teacher={"model": "m", "chat_template": False})
    assert told.teacher is not None
    assert told.teacher.chat_template is False
    plain = minimal(scoring=DROP)
    assert plain.teacher is not None
    assert plain.teacher.chat_template is None


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"objective": {"type": "grpo"}, "teacher": None, **REWARDED},
        ["scoring.alignment has no effect", "grpo reads no teacher", "leave it null"],
    ),
    (
        {
            "teachers": {"code": {"model": "c"}},
            "data": {"train": "t.jsonl", "teacher_key": "who"},
        },
        ["several teachers", "got teacher, code", "keep one"],
    ),
    (
        {"teacher": None, "teachers": {"a": {"model": "c"}}, "scoring": {"mixture": {"a": 1.0}}},
        ["section teacher", "got a"],
    ),
    (
        {"teacher": {"model": "student", "source": {"type": "ema", "decay": 0.9}}},
        ["teacher.source.type must be checkpoint", "got ema"],
    ),
    ({"workers": {"count": 2}}, ["workers.count must be 0 with scoring.alignment", "got 2"]),
    (
        {
            "sites": {"members": {"far": {}}},
            "weight_sync": {"type": "disk", "directory": "/weights"},
            "evaluation": {"problems": 0},
        },
        ["sites.members must be none with scoring.alignment", "got far"],
    ),
    (
        {
            "environment": {"type": "calculator"},
            "data": {"train": "t.jsonl", "chat_template": True},
        },
        ["environment must be null with scoring.alignment", "got calculator"],
    ),
    (
        {"metrics": {"health_every": 5}},
        ["metrics.health_every must be 0 with scoring.alignment", "got 5"],
    ),
    (
        {"metrics": {"leak_every": 5}, "data": {"train": "t.jsonl", "teacher_prompt_key": "hint"}},
        ["metrics.leak_every must be 0 with scoring.alignment", "got 5"],
    ),
    (
        {"support": {"type": "teacher_topk"}, "objective": {"type": "forward_kl"}},
        ["support.type must be one of the student's", "got teacher_topk", "use mc or topk"],
    ),
    (
        {"support": {"type": "exact"}, "objective": {"type": "sparse_reverse_kl"}},
        ["support.type must not be exact", "sparse_reverse_kl", "use topk"],
    ),
    (
        {"objective": GRPO, **REWARDED},
        ["objective.kl.to must not be teacher", "got teacher in objective.type grpo", "sampler"],
    ),
    (
        {"scoring": CHUNK, "objective": ROLLOUT},
        ["support.type must be path", "scoring.alignment.unaligned chunk", "got mc"],
    ),
    (
        {"scoring": CHUNK, "support": PATH},
        ["reverse_kl with advantage rollout", "got reverse_kl with advantage current"],
    ),
    (
        {"scoring": CHUNK, "support": PATH, "objective": {"type": "forward_kl"}},
        ["got forward_kl with advantage none", "or unaligned: drop"],
    ),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_does_not_suit_is_refused(changes: dict[str, Any], said: list[str]):
    scoring = DROP | changes.get("scoring", {})
    with pytest.raises(ValidationError) as refused:
        Config.model_validate(MINIMAL | changes | {"scoring": scoring})
    (error,) = refused.value.errors()
    for words in (*said, "scoring.alignment", ", got "):
        assert words in error["msg"]
    assert "\n" not in error["msg"]
    # the key is what is refused: without it the same file is fine
    plain = {key: value for key, value in scoring.items() if key != "alignment"}
    Config.model_validate(MINIMAL | changes | {"scoring": plain})


def test_every_rule_is_broken_by_a_row(monkeypatch: pytest.MonkeyPatch):
    broken: set[str] = set()

    def watched(rule):
        def told(config):
            found = rule(config)
            if found is not None:
                broken.add(rule.__name__)
            return found

        return told

    monkeypatch.setattr(schema, "ALL_RULES", tuple(map(watched, ALIGNMENT_RULES)))
    for changes, _ in REFUSED:
        scoring = DROP | changes.get("scoring", {})
        with pytest.raises(ValidationError):
            Config.model_validate(MINIMAL | changes | {"scoring": scoring})
    assert broken == {rule.__name__ for rule in ALIGNMENT_RULES}
