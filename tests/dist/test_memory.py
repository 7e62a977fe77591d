"""A learner that gives up its memory after every update computes what one does that keeps it."""

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.records.types import Batch
from tests.dist import memory_jobs, state_jobs
from tests.dist.caches import make_batch
from tests.dist.worlds import run_world
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

STEP = {
    "optimizer": {"lr": 1e-3, "eps": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1},
    "max_tokens_per_microbatch": 64,
    "num_mini_batches": 2,
}
UPDATES = 3
# experts have an optimizer of their own; in float32 the optimizer's parameters are the weights
CASES: dict[str, dict[str, Any]] = {
    "dense float32": {"parallel": {"dp": 2}},
    "moe bfloat16": {"parallel": {"dp": 2, "ep": 2}, "dtype": "bfloat16"},
    "overlap": {
        "parallel": {"dp": 2},
        "dtype": "bfloat16",
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    dense = tiny_qwen3(base / "dense", seed=3)
    moe = tiny_qwen3_moe(base / "moe", seed=4, num_hidden_layers=2, mlp_only_layers=[1])
    return {"dense float32": dense, "moe bfloat16": moe, "overlap": dense}


def batches_of(model: Path) -> list[Batch]:
    return [make_batch(model, samples=4, seed=u, vocab=512, update=u) for u in range(UPDATES)]


@pytest.mark.parametrize("case", CASES)
def test_taking_turns_changes_no_bit(case: str, models: dict[str, Path], tmp_path: Path):
    """Updates, weights, and the checkpoint that was written from offloaded memory."""
    config = STEP | CASES[case]
    common = {"model": models[case], "config": config, "batches": batches_of(models[case])}
    ranks = math.prod(size for axis, size in config["parallel"].items() if axis != "ep")
    kept = tmp_path / "kept"
    options = {"save_after": 1, "target": kept, "in_background": False}
    unbroken = run_world(state_jobs.unbroken, ranks, tmp_path / "unbroken", **common, **options)
    saved = tmp_path / "saved"
    turns = run_world(memory_jobs.turns, ranks, tmp_path / "turns", **common, target=saved)
    assert turns["rows"] == unbroken["rows"]
    assert turns["digest"] == unbroken["digest"]
    assert turns["moved_bytes"] > 0, "nothing was given up"
    sources = {"kept": kept, "saved": saved}
    resumed = run_world(state_jobs.resumed, ranks, tmp_path / "resumed", **common, sources=sources)
    for name in sources:
        assert resumed[name]["rows"] == unbroken["rows"][1:], name
        assert resumed[name]["digest"] == unbroken["digest"], name
