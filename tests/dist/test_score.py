"""What `opd mismatch` asks of the learner: sampled tokens' log-probs in every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_opd.metrics.mismatch import compare
from megatron_opd.records.types import Batch
from tests.dist import caches, jobs, score_jobs
from tests.dist.caches import load_float64, make_batch, with_experts, with_gates
from tests.dist.forced_gates import ForcedGates
from tests.dist.layouts import ADAM
from tests.dist.worlds import run_world
from tests.support.figures import bounded
from tests.support.models import tiny_qwen3_moe

pytestmark = pytest.mark.dist

VOCAB, EXPERTS, TOPK, LAYERS = 512, 8, 3, 4
TEMPERATURE = 0.7
# One sample more than two data-parallel ranks share equally.
SAMPLES = 7
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dense log-probs": (1, {"logp": "dense"}),
    "dp2": (2, {"parallel": {"dp": 2}}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "vpp2": (2, {"parallel": {"pp": 2, "vpp": 2}}),
    "tp2ep2": (2, {"parallel": {"tp": 2, "ep": 2}}),
    "pp2 dp2 ep2": (4, {"parallel": {"pp": 2, "dp": 2, "ep": 2}}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = {"num_hidden_layers": 4, "num_experts": EXPERTS, "num_experts_per_tok": TOPK}
    return tiny_qwen3_moe(tmp_path_factory.mktemp("score") / "moe", seed=4, **experts)


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    made = make_batch(model, samples=SAMPLES, seed=7, vocab=VOCAB, temperature=TEMPERATURE)
    routed = with_experts(made, caches.random_experts(made, 11, (LAYERS, EXPERTS, TOPK)))
    return with_gates(routed, caches.random_gates(routed, 12, (LAYERS, TOPK)))


@pytest.fixture(scope="module")
def exact(model: Path, batch: Batch) -> list[np.ndarray]:
    """By transformers in float64."""
    return scored(model, batch)


@pytest.fixture(scope="module")
def exact_weighed(model: Path, batch: Batch) -> list[np.ndarray]:
    """The same with the given experts and their given weights."""
    with pytest.MonkeyPatch.context() as patch:
        ForcedGates(patch, weighs=True)
        return scored(model, batch)


def scored(model: Path, batch: Batch) -> list[np.ndarray]:
    student, found = load_float64(model), []
    for sample in batch.samples:
        ids = torch.tensor(sample.rollout.response_ids_T, dtype=torch.int64)
        with torch.no_grad():
            logp = caches.response_logp(student, sample, TEMPERATURE)
        found.append(logp[torch.arange(len(ids)), ids].numpy())
    return found


@pytest.fixture(scope="module")
def runs(
    model: Path, batch: Batch, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    base, found = tmp_path_factory.mktemp("runs"), {}
    for name, (size, config) in LAYOUTS.items():
        settings = {"routing_replay": "rollout", "routing_weights": "sampler"}
        settings |= {"max_tokens_per_microbatch": 48} | config
        arguments = {"model": model, "config": settings, "batch": batch}
        out = base / name.replace(" ", "-")
        result = run_world(score_jobs.score, size, out, temperature=TEMPERATURE, **arguments)
        found[name] = result["scores"]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_equal_float64_in_every_layout(name, runs, exact, exact_weighed):
    free, replayed, gated = runs[name]
    for mine, theirs in zip(free["logp"], exact, strict=True):
        bounded("scored log-probs against float64", np.abs(mine - theirs).max(), 2e-5, name)
    for mine, theirs in zip(replayed["logp"], runs["one"][1]["logp"], strict=True):
        gap = np.abs(np.subtract(mine, theirs)).max()
        bounded("scored log-probs with given experts against one rank", gap, 2e-5, name)
    for mine, theirs in zip(gated["logp"], exact_weighed, strict=True):
        gap = np.abs(mine - theirs).max()
        bounded("scored log-probs with given gates against float64", gap, 2e-5, name)
    for one, other in ((free, replayed), (replayed, gated)):
        pairs = zip(one["logp"], other["logp"], strict=True)
        gaps = [np.abs(np.subtract(a, b)).max() for a, b in pairs]
        assert max(gaps) > 0.1, "control: random experts, then weights, are other log-probs"


@pytest.mark.parametrize("name", LAYOUTS)
def test_choices_of_experts_are_counted_once_in_every_layout(name, runs, batch):
    free, replayed, gated = runs[name]
    inputs = sum(sample.rollout.num_tokens - 1 for sample in batch.samples)
    choices = inputs * LAYERS * TOPK
    assert free["choices"] == replayed["choices"] == gated["choices"] == choices
    # a random expert is among the router's own with probability 3/8
    assert 0.5 < free["moved"] / free["choices"] < 0.75
    assert free["moved"] == runs["one"][0]["moved"]
    assert replayed["moved"] == runs["one"][1]["moved"]
    assert gated["moved"] == runs["one"][2]["moved"]


def test_the_figures_are_those_of_a_train_step(model, batch, runs, tmp_path):
    """probs_diff_max and _mean of the same batch: the headline and what it is without replay."""
    config = {"optimizer": ADAM, "max_tokens_per_microbatch": 48, "routing_replay": "rollout"}
    config |= {"routing_compare_every": 1}
    arguments = {"model": model, "config": config, "batches": [batch], "temperature": TEMPERATURE}
    (row,) = run_world(jobs.update, 1, tmp_path, **arguments)["metrics"]
    draws = [sample.rollout.draws for sample in batch.samples]
    sampled = [each.sampler_logp_N[each.path_T] for each in draws]
    for kind, scores in zip(("free_", ""), runs["one"][:2], strict=True):
        gap = compare(sampled, [np.float32(each) for each in scores["logp"]], [99], 0.1).gap
        assert gap.tokens == row["mismatch_tokens"]
        assert gap.max_dp.max == pytest.approx(row[f"probs_diff_{kind}max"], rel=1e-5)
        assert gap.token_mean_dp == pytest.approx(row[f"probs_diff_{kind}mean"], rel=1e-5)
