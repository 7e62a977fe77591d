"""What teachers read, against what students read: each rule with the line a user sees."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_opd.config import schema
from megatron_opd.config.load import ConfigError, load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.teacher_rules import TEACHER_RULES
from tests.support.config_files import MINIMAL

FROM_TEACHER = ["objective={type: sft_on_teacher}"]
REFUSED: list[tuple[list[str], list[str], list[str]]] = [
    (
        ["objective.type=grpo", "rollout.group_size=2", "data.teacher_prompt_key=hint"],
        ["data.teacher_prompt_key hint", "grpo", "leave it null"],
        ["data.teacher_prompt_key=null"],
    ),
    (
        ["data.without_teacher_prompt=skip"],
        ["without_teacher_prompt needs teacher_prompt_key", "skip", "leave this out"],
        ["data.teacher_prompt_key=hint"],
    ),
    (
        ["metrics.leak_every=5"],
        ["metrics.leak_every needs data.teacher_prompt_key", "got 5", "leave this out"],
        ["data.teacher_prompt_key=hint"],
    ),
    (
        ["metrics.leak_every=5", "data.teacher_prompt_key=hint", "teacher.chat_template=true"],
        ["metrics.leak_every must be 0 with teacher.", "got 5", "leave one of them out"],
        ["metrics.leak_every=0"],
    ),
    (
        ["objective.type=grpo", "rollout.group_size=2", "teacher.chat_template=true"],
        ["teacher.chat_template", "grpo", "True", "leave it null"],
        ["teacher.chat_template=null"],
    ),
    (
        [
            "environment={type: guess, history: branch}",
            "data.chat_template=true",
            "teacher.system_prompt=Add.",
        ],
        ["teacher.system_prompt", "environment.history branch", "Add.", "leave one of them out"],
        ["environment.history=append"],
    ),
    (
        ["teacher.chat_template=true", "scoring.mixture={teacher: 1.0}"],
        ["teacher.chat_template must be null with scoring.mixture", "leave one of them out"],
        ["teacher.chat_template=null"],
    ),
    (
        ["teacher.chat_template=false", "teacher.system_prompt=Add."],
        ["teacher.system_prompt needs teacher.chat_template", "Add.", "leave it out"],
        ["teacher.chat_template=true"],
    ),
    (
        ["environment={type: guess}", "data.chat_template=true", "data.teacher_prompt_key=hint"],
        ["data.teacher_prompt_key", "environment", "hint", "leave one of them out"],
        ["data.teacher_prompt_key=null"],
    ),
    (
        ["metrics.leak_every=5", "data.teacher_prompt_key=hint", *FROM_TEACHER],
        ["metrics.leak_every must be 0 with objective.type sft_on_teacher", "got 5"],
        ["metrics.leak_every=0"],
    ),
]
"""Keys, words of the line, and keys that mend it."""


def error_of(tmp_path: Path, overrides: list[str]) -> str | None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    try:
        load_config(Config, path, overrides)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("overrides", "words", "fix"), REFUSED, ids=str)
def test_it_is_refused_in_one_line(
    tmp_path: Path, overrides: list[str], words: list[str], fix: list[str]
):
    message = error_of(tmp_path, overrides)
    assert message is not None
    assert "\n" not in message
    for word in words:
        assert word in message
    assert error_of(tmp_path, [*overrides, *fix]) is None


def test_the_table_covers_every_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken: set[str] = set()

    def watched(rule: Any) -> Any:
        def run(config: Config) -> str | None:
            said = rule(config)
            if said is not None:
                broken.add(rule.__name__)
            return said

        return run

    monkeypatch.setattr(schema, "ALL_RULES", tuple(map(watched, TEACHER_RULES)))
    for overrides, _, _ in REFUSED:
        assert error_of(tmp_path, overrides) is not None
    assert broken == {rule.__name__ for rule in TEACHER_RULES}
