"""What a site says of its own copy of the student, and what its learner answers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.inputs.prepare import prepare
from megatron_opd.sites.handshake import ExpectedSite, refusal
from megatron_opd.sites.site_ready import read_input
from tests.support.cli_cases import small_config
from tests.support.models import tiny_qwen3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student has 24 rows more than its teacher."""
    root = tmp_path_factory.mktemp("models")
    tiny_qwen3(root / "student", vocab_size=536)
    tiny_qwen3(root / "teacher")
    shutil.copy(root / "teacher" / "tokenizer.json", root / "student")
    return root


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def config_of(root: Path, models: Path, *, scores: bool = True) -> Config:
    root.mkdir()
    (root / "weights").mkdir()
    sections = {
        "weight_sync": {"type": "disk", "directory": str(root / "weights")},
        "sites": {"members": {"far": {"scores": scores}}},
    }
    return Config.model_validate(small_config(root, models) | sections)


def answer(tmp_path: Path, models: Path, *, scores: bool = True) -> str | None:
    """Why a site with models of its own is refused."""
    ours = config_of(tmp_path / "learner", tmp_path / "models")
    site = read_input(config_of(tmp_path / "site", models, scores=scores), "far")
    prepared = prepare(ours)
    expected = ExpectedSite.of(ours, prepared.student.vocab_size, prepared.ending)
    return refusal(site.hello, "far", scores, expected, 0.0)


def without(models: Path) -> None:
    shutil.rmtree(models / "teacher")


def ends_there(models: Path) -> None:
    rewritten(
        models / "student" / "generation_config.json", lambda t: t.update(eos_token_id=[1, 9])
    )


def names_another_end(models: Path) -> None:
    rewritten(models / "student" / "tokenizer_config.json", lambda t: t.update(eos_token="<pad>"))


@pytest.mark.parametrize(
    ("change", "scores", "words"),
    [
        (None, True, ()),
        (ends_there, True, ("at ids [1, 9], the learner at [1]", "generation_config.json", "copy")),
        (names_another_end, True, ("at ids [0, 1], the learner at [1]", "tokenizer_config.json")),
        (without, False, ("samples from 536 ids, the learner trains 512", "every teacher")),
    ],
)
def test_a_site_ends_and_samples_as_the_learner_does(
    change: Callable[[Path], None] | None,
    scores: bool,
    words: tuple[str, ...],
    models: Path,
    tmp_path: Path,
):
    for name in ("models", "copy"):
        shutil.copytree(models, tmp_path / name)
    if change is not None:
        change(tmp_path / "copy")
    line = answer(tmp_path, tmp_path / "copy", scores=scores)
    assert (line is None) == (not words)
    assert all(word in str(line) for word in words), line
    assert "\n" not in str(line)
