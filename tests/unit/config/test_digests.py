"""What a learner must have been given as its controller was."""

from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.digests import (
    MODEL,
    NOT_THE_LEARNERS,
    differing_keys,
    flat,
    learner_digests,
    matches,
)
from megatron_opd.config.schema import Config


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(200_000))
    section = {"model": str(model)}
    return {"data": {"train": "a"}, "student": dict(section), "teacher": dict(section)}


def differing(tree: dict[str, Any], key: str, value: Any) -> list[str]:
    ours = learner_digests(Config.model_validate(tree))
    node = tree
    *sections, last = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = value
    return differing_keys(ours, learner_digests(Config.model_validate(tree)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learner.optimizer.lr", 0.5),
        ("learner.optimizer.eps", 0.5),
        ("learner.megatron.bias_dropout_fusion", False),
        ("reduction", {"type": "sequence_mean"}),
        ("objective", {"type": "forward_kl"}),
        ("run.seed", 7),
        ("run.max_steps", 7),
        ("run.deterministic", False),
        ("rollout.temperature", 0.5),
        ("weight_sync.bucket_bytes", 7),
        ("buffer.batch_size", 7),
    ],
)
def test_a_key_that_the_learner_reads_is_named(tree: dict[str, Any], key: str, value: Any):
    found = differing(tree, key, value)
    if key == "run.deterministic":
        assert found == []  # its default
    else:
        assert any(name.startswith(key) or key.startswith(name) for name in found), found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.dir", "elsewhere"),
        ("data.train", "b"),
        ("student.urls", ["http://127.0.0.1:1"]),
        ("teacher.model", "other"),
        ("learner.listen_port", 7),
        ("learner.threads", 7),
        ("learner.gpus", [7]),
        ("cluster.share_gpus", True),
        ("metrics.trace", False),
        ("checkpoint.every", 7),
    ],
)
def test_a_key_that_it_does_not_read_may_differ(tree: dict[str, Any], key: str, value: Any):
    assert differing(tree, key, value) == []


def test_a_model_is_compared_by_content(tree: dict[str, Any], tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (tmp_path / "model").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert differing(tree, "student.model", str(copy)) == []
    (copy / "model.safetensors").write_bytes(bytes(199_999) + b"x")
    assert differing(tree, "student.model", str(tmp_path / "model")) == [MODEL]
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match=r"student\.model: cannot read .*config\.json"):
        differing(tree, "student.model", str(copy))


def test_a_new_key_is_compared_from_the_start(tree: dict[str, Any]):
    assert not matches("learner.a_new_key", NOT_THE_LEARNERS)
    assert not matches("a_new_section.key", NOT_THE_LEARNERS)
    config = Config.model_validate(tree)
    keys, compared = flat(config.model_dump(mode="json")).keys(), learner_digests(config).keys()
    listed = [key for key in keys if matches(key, NOT_THE_LEARNERS)]
    assert compared | set(listed) == keys
    for pattern in NOT_THE_LEARNERS:
        possible = [*keys, "teachers.a", "teacher"]
        assert any(matches(key, [pattern]) for key in possible), f"{pattern} lists nothing"
