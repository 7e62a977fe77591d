"""What a file leaves out is chosen by what the run learns from and by its sampler."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_opd.config.corrections import TruncatedCorrection
from megatron_opd.config.defaults import bounds, has_experts, said
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from tests.support.config_files import MINIMAL

TRUNCATED = TruncatedCorrection(max_ratio=2.0, prox=True)
GROUPS = "rollout.group_size=4"
INT8 = "weight_sync.round_to=int8"
TEACHERS_SET = ["objective.type=forward_kl", "support={type: teacher_topk, k: 8}"]


def config_of(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return load_config(Config, path, overrides)


def mixture(tmp_path: Path, key: str = "num_experts", count: Any = 8) -> str:
    folder = tmp_path / "mixture"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: count}))
    return f"student.model={folder}"


@pytest.mark.parametrize(
    ("overrides", "truncated"),
    [
        ([], False),
        (["support.type=exact"], False),
        (["objective.type=grpo", GROUPS, "data.task=arithmetic"], True),
        (["objective.type=ppo", "data.task=arithmetic"], True),
        (["objective.type=gspo", GROUPS, "data.task=arithmetic"], True),
        (["objective.type=reinforce", "data.task=arithmetic"], True),
        (["objective.type=gepo", GROUPS, "data.task=arithmetic"], False),
        (["objective.type=gepo", GROUPS, "data.task=arithmetic", INT8], False),
        ([INT8], True),
        (["student.quantization=fp8"], True),
        ([INT8, *TEACHERS_SET], False),
        ([INT8, "objective.type=sparse_reverse_kl"], False),
    ],
    ids=str,
)
def test_the_ratio_is_truncated_by_objective_and_sampler(
    overrides: list[str], truncated: bool, tmp_path: Path
):
    config = config_of(tmp_path, *overrides)
    assert config.correction == (TRUNCATED if truncated else None)
    text = dict(said(config)).get("correction", "")
    assert ("truncated at 2, with prox: the default, since" in text) is truncated
    again = config_of(tmp_path, *overrides, "correction.type=importance") if truncated else config
    assert again.correction != TRUNCATED, "what a file says stays"


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_mixture_in_bfloat16_is_replayed_and_its_ratio_truncated(key: str, tmp_path: Path):
    model = mixture(tmp_path, key)
    config = config_of(tmp_path, model)
    assert config.learner.routing_replay == "rollout"
    assert config.correction == TRUNCATED
    exact = ["learner.dtype=float32", "student.dtype=float32"]
    for held in (exact, ["learner.routing_replay=off", "correction.type=importance"]):
        config = config_of(tmp_path, model, *held)
        assert config.learner.routing_replay == "off"
        assert config.correction != TRUNCATED
    for held in (
        "learner.megatron={moe_router_load_balancing_type: sinkhorn}",
        "student.urls=[http://127.0.0.1:1]",
    ):
        config = config_of(tmp_path, model, held)
        assert (config.learner.routing_replay, config.correction) == ("off", TRUNCATED)
    half = config_of(tmp_path, model, "learner.dtype=float32", "student.dtype=bfloat16")
    assert half.learner.routing_replay == "rollout"


@pytest.mark.parametrize("count", [0, None, "8", []])
def test_a_model_without_experts_is_none(count: Any, tmp_path: Path):
    config = config_of(tmp_path, mixture(tmp_path, count=count))
    assert (config.learner.routing_replay, config.correction) == ("off", None)
    for text in ("[]", "{", "null"):
        (tmp_path / "mixture/config.json").write_text(text)
        assert not has_experts(tmp_path / "mixture")


def test_what_is_chosen_is_named_in_the_resolved_file(tmp_path: Path):
    config = config_of(tmp_path, mixture(tmp_path), INT8)
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    again = load_config(Config, path, [])
    assert again == config
    assert again.model_dump(mode="json")["correction"]["prox"] is True


def test_what_bounds_an_update_is_said_where_the_clip_cannot(tmp_path: Path):
    grpo = ["objective.type=grpo", GROUPS, "data.task=arithmetic"]
    text = bounds(config_of(tmp_path, *grpo, "learner.optimizer.lr=3.0e-6"))
    assert text is not None
    assert "learner.optimizer.lr 3e-06 with clip_grad 1" in text
    for free in (
        ["learner.num_mini_batches=2", "buffer.batch_size=8"],
        ["objective.trust.type=none"],
        ["correction.type=importance"],
    ):
        assert bounds(config_of(tmp_path, *grpo, *free)) is None
