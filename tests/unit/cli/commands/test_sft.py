"""What `opd sft` refuses and notes before it trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_opd.cli.main import main
from megatron_opd.launch import sft
from tests.support.cli_cases import refused

TEMPLATE = (
    "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


class Learner:
    """Stands where the learner's processes would be started."""

    def __init__(self, *given: Any, **more: Any) -> None:
        del given, more

    def start(self) -> None:
        """Start nothing."""

    def wait(self) -> int:
        return 0

    def stop(self, grace_s: float) -> None:
        del grace_s


@pytest.fixture
def tree(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sft, "LearnerProcess", Learner)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    return {
        "init": str(models / "student"),
        "output": str(tmp_path / "out"),
        "train": str(tmp_path / "rows.jsonl"),
        "batch_size": 1,
        "messages_key": "messages",
        "chat_template": str(tmp_path / "own.jinja"),
    }


def run(tmp_path: Path, tree: dict[str, Any]) -> int:
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    return main(["sft", str(tmp_path / "sft.yaml")])


def test_chats_are_trained_on_and_what_is_odd_is_noted(
    tmp_path: Path, tree: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tree["chat_template_kwargs"] = {"thinking": False}
    assert run(tmp_path, tree) == 0
    shown = capsys.readouterr().out
    assert "note: chat_template: the chat template reads the clock" in shown
    assert "does not read thinking, which has no effect" in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chat_template": "none.jinja"}, ["error: chat_template: cannot read none.jinja"]),
        ({"chat_template": True}, ["chat_template is true but the tokenizer has no chat templat"]),
        ({"chat_template": False}, ["messages_key needs chat_template: true or a file"]),
        ({"messages_key": "chat"}, ["rows.jsonl", "missing column 'chat'"]),
        ({"system_prompt": "s", "messages_key": None}, ["missing column"]),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(
    tmp_path: Path,
    tree: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: list[str],
) -> None:
    refused(capsys, run(tmp_path, tree | changes), *words)
    assert not (tmp_path / "out").exists()
