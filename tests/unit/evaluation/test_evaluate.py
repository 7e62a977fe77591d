"""What `opd eval` asks a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.environments.protocol import row_of
from megatron_opd.errors import UserError
from megatron_opd.evaluation.evaluate import questions_of


def test_held_out_problems_end_at_the_same_strings_as_rollouts(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "ends": "#"}, {"prompt": "1+2=", "answer": "3"}]
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config["data"] |= {"train": str(held_out), "heldout": str(held_out), "stop_key": "ends"}
    config["rollout"]["stop"] = ["!"]
    config["evaluation"]["problems"] = 2
    (found,) = questions_of(Config.model_validate(config)).sets.values()
    assert found.plan.stop == ("!",)
    assert [prompt.stop for prompt in found.prompts] == [("#",), ()]


def playing_config(tmp_path: Path, config: dict[str, Any], **environment: Any) -> Config:
    """An environment, two problems without answers, and no verifier."""
    rows = [{"prompt": "guess", "goal": {"n": 3}}, {"prompt": "again"}]
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}#{{ m['content'] }}\n{% endfor %}")
    files = {"train": str(held_out), "heldout": str(held_out), "chat_template": str(template)}
    config["data"] |= {**files, "task": "none"}
    config["environment"] = {"type": "guess", "max_tokens": 500, **environment}
    config["evaluation"] = {"problems": 2}
    return Config.model_validate(config)


def test_problems_of_an_environment_need_no_answers_and_keep_its_columns(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    questions = questions_of(playing_config(tmp_path, config, columns=["goal"]))
    assert questions.judge is None
    assert questions.turns is not None
    (found,) = questions.sets.values()
    rows = [row_of(prompt, 7) for prompt in found.prompts]
    assert [(row.prompt, row.answer) for row in rows] == [("guess", None), ("again", None)]
    assert [row.columns for row in rows] == [{"goal": {"n": 3}}, {"goal": None}]


def test_a_column_that_no_row_has_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        questions_of(playing_config(tmp_path, config, columns=["goal", "gaol"]))
    assert "environment.columns must name a column of data.train, got 'gaol'" in str(raised.value)
