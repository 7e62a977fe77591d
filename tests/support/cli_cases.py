"""The `opd` program on tiny models: a valid configuration, a call, how a refusal looks."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_opd.cli.main import main
from tests.support.models import tiny_qwen3, tiny_qwen3_moe


def tiny_models(root: Path) -> Path:
    """`root` with the checkpoints `teacher` and `student`."""
    tiny_qwen3(root / "teacher")
    tiny_qwen3_moe(root / "student")
    return root


def small_config(tmp_path: Path, models: Path) -> dict[str, Any]:
    """A configuration that every check accepts."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return {
        "run": {"dir": str(tmp_path / "run")},
        "data": {"train": str(tmp_path / "train.jsonl"), "task": "exact"},
        "student": {"model": str(models / "student")},
        "teacher": {"model": str(models / "teacher")},
        "rollout": {"max_new_tokens": 64},
        "evaluation": {"problems": 0},
    }


def call(tmp_path: Path, tree: dict[str, Any], *arguments: str, verb: str = "run") -> int:
    """Exit code of `opd VERB` on `tree`."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return main([verb, str(path), *arguments])


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> None:
    """Bad input: exit code 2 and one line that has all the words."""
    output = capsys.readouterr()
    assert code == 2
    lines = output.err.strip().splitlines()
    assert len(lines) == 1, output.err
    for word in words:
        assert word.lower() in lines[0].lower()
