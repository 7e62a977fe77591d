"""The log-probs of a batch's start: the first mini-batch's own pass gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_opd.records.types import Batch
from tests.dist import prox_jobs
from tests.dist.caches import make_batch
from tests.dist.layouts import ADAM, TIMES, weights
from tests.dist.worlds import run_world
from tests.support.models import dense_and_moe

pytestmark = pytest.mark.dist

VOCAB = 512
MINIS = 4
PROX = {
    "objective": {"type": "reverse_kl", "trust": {"type": "clip", "low": 0.02, "high": 0.02}},
    "correction": {"type": "truncated", "max_ratio": 1.1, "prox": True},
}
# (model, learner's keys, ranks)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": ("dense", {}, 1),
    "pp2": ("dense", {"parallel": {"pp": 2}}, 2),
    "tp2": ("dense", {"parallel": {"tp": 2}}, 2),
    "moe": ("moe", {}, 1),
    "recorded routing": ("moe", {"routing_replay": "current"}, 1),
    "bfloat16": ("dense", {"dtype": "bfloat16"}, 1),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return dense_and_moe(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def batches(models: dict[str, Path]) -> dict[str, Batch]:
    return {
        kind: make_batch(model, samples=8, seed=5, vocab=VOCAB) for kind, model in models.items()
    }


def learnt(
    model: Path, config: dict[str, Any], ranks: int, batch: Batch, out: Path, *, shared: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[int]]:
    """Metrics, weights and the passes of an update."""
    settings = {"optimizer": ADAM, "num_mini_batches": MINIS, "max_tokens_per_microbatch": 32}
    result = run_world(
        prox_jobs.update,
        ranks,
        out,
        shared=shared,
        model=model,
        config=settings | config,
        batches=[batch],
        estimator=PROX,
    )
    (metrics,) = result["metrics"]
    figures = {name: value for name, value in metrics.items() if name not in TIMES}
    return figures, weights(out, 0), json.loads((out / "passes.json").read_text())


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_shared_pass_changes_no_bit(
    name: str, models: dict[str, Path], batches: dict[str, Batch], tmp_path: Path
):
    kind, config, ranks = CASES[name]
    both = [
        learnt(models[kind], config, ranks, batches[kind], tmp_path / str(shared), shared=shared)
        for shared in (True, False)
    ]
    (ours, our_weights, made), (theirs, their_weights, unshared) = both
    if name == "recorded routing":  # the first mini-batch replays nothing now
        moved = [figures.pop("routing_moved_fraction") for figures in (ours, theirs)]
        assert moved[0] > moved[1] > 0
    assert ours == theirs
    assert our_weights.keys() == their_weights.keys()
    for tensor in our_weights:
        assert torch.equal(our_weights[tensor], their_weights[tensor]), tensor
    # the trust region acts, and only from the second mini-batch on
    assert 0 < ours["stopped_fraction"] < 1
    assert len(made) == MINIS - 1
    assert made == unshared[1:]
    assert len(unshared) == MINIS


def test_one_mini_batch_takes_no_pass(
    models: dict[str, Path], batches: dict[str, Batch], tmp_path: Path
):
    # no trust region, which would have no effect
    settings = {"optimizer": ADAM}
    run_world(
        prox_jobs.update,
        1,
        tmp_path,
        shared=True,
        model=models["dense"],
        config=settings,
        batches=[batches["dense"]],
        estimator={"correction": PROX["correction"]},
    )
    assert json.loads((tmp_path / "passes.json").read_text()) == []
