"""What teachers whose servers are not ours cannot do, each with the line a user sees."""

from typing import Any

import pytest

from megatron_opd.config import schema
from megatron_opd.config.api_rules import API_RULES
from megatron_opd.config.schema import Config
from megatron_opd.config.teacher_api import SCORABLE
from tests.support.config_files import minimal

PATH = {"type": "path"}
FOREIGN = {"model": "m", "urls": ["http://127.0.0.1:1"], "api": "sglang"}
SOUND = {"teacher": FOREIGN, "support": PATH}

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"support": {"type": "mc"}},
        ["support.type must be path or teacher_topk with teacher.api sglang", "got mc", "bridge"],
    ),
    (
        {"support": {"type": "topk"}, "objective": {"type": "sparse_reverse_kl"}},
        ["support.type must be path or teacher_topk", "got topk"],
    ),
    (
        {"teacher": FOREIGN | {"api": "chat"}},
        ["teacher.api must not be chat", "reads log-probs", "sft_on_teacher"],
    ),
    ({"scoring": {"temperature": 0.7}}, ["scoring.temperature must be 1.0", "got 0.7"]),
    ({"metrics": {"health_every": 2}}, ["metrics.health_every must be 0", "got 2"]),
    (
        {
            "metrics": {"leak_every": 2},
            "data": {"train": "train.jsonl", "teacher_prompt_key": "hint"},
        },
        ["metrics.leak_every must be 0 with teacher.api sglang", "got 2"],
    ),
    (
        {"scoring": {"alignment": {}}},
        ["scoring.alignment must be null with teacher.api sglang", "got an alignment"],
    ),
    (
        {
            "sites": {"members": {"far": {}}},
            "weight_sync": {"type": "disk", "directory": "/weights"},
            "evaluation": {"problems": 0},
        },
        ["sites.members must be empty with teacher.api sglang", "got far"],
    ),
    (
        {"environment": {"type": "user"}, "data": {"train": "t.jsonl", "chat_template": True}},
        ["environment.teacher must be another one with teacher.api sglang", "got this teacher"],
    ),
    ({"workers": {"count": 1}}, ["workers.count must be 0 with teacher.api sglang", "got 1"]),
    (
        {"run": {"dir": "d", "deterministic": True, "max_steps": 2}, "schedule": {"type": "sync"}},
        ["run.deterministic must be false with teacher.api sglang", "got true"],
    ),
    (
        {"teacher": FOREIGN | {"source": {"type": "student"}, "model": "student"}},
        ["teacher.source.type must be checkpoint", "got student"],
    ),
    ({"teacher": FOREIGN | {"urls": []}}, ["teacher.urls must name the servers", "got none"]),
    (
        {"teacher": {"model": "m", "cost_per_million_tokens": 3.0}},
        ["teacher.cost_per_million_tokens has no effect with teacher.api bridge", "got 3.0"],
    ),
    (
        {"teacher": {"model": "m", "served_name": "x"}},
        ["teacher.served_name has no effect with teacher.api bridge", "got x"],
    ),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=str)
def test_it_is_refused_by_name(changed: dict[str, Any], words: list[str]):
    minimal(**SOUND)
    with pytest.raises(ValueError, match=r"must|has no effect") as found:
        minimal(**(SOUND | changed))
    for word in words:
        assert word in str(found.value)


def test_the_table_covers_every_rule(monkeypatch: pytest.MonkeyPatch):
    broken: set[str] = set()

    def watched(rule: Any) -> Any:
        def run(config: Config) -> str | None:
            said = rule(config)
            broken.update([rule.__name__] if said is not None else [])
            return said

        return run

    monkeypatch.setattr(schema, "ALL_RULES", tuple(map(watched, schema.ALL_RULES)))
    for changed, _ in REFUSED:
        with pytest.raises(ValueError, match=r"teacher\."):
            minimal(**(SOUND | changed))
    assert broken == {rule.__name__ for rule in API_RULES}


@pytest.mark.parametrize("api", SCORABLE)
def test_what_is_declared_is_taken(api: str):
    section = FOREIGN | {"api": api}
    supports = SCORABLE[api].supports  # type: ignore[index]
    for support in ("path", "mc", "teacher_topk") if supports is None else supports:
        objective = {"type": "forward_kl" if support == "teacher_topk" else "reverse_kl"}
        minimal(teacher=section, support={"type": support}, objective=objective)


def test_a_server_beyond_this_machine_needs_its_key_from_the_environment():
    far = FOREIGN | {"urls": ["https://api.example.com"]}
    with pytest.raises(ValueError, match=r"teacher.api_key_env must name the variable"):
        minimal(**(SOUND | {"teacher": far}))
    minimal(**(SOUND | {"teacher": far | {"api_key_env": "KEY"}}))
