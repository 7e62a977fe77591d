"""The sampler's gate weights in training: float64 autograd, and the same in every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_opd.records.types import Batch
from tests.dist import jobs
from tests.dist.caches import (
    make_batch,
    oracle_update,
    random_experts,
    random_gates,
    with_experts,
    with_gates,
)
from tests.dist.forced_gates import EXPERTS, MOE_LAYERS, TOPK, ForcedGates, both_ways_of_normalising
from tests.dist.layouts import ADAM, BALANCED, relative_gap, weights
from tests.dist.worlds import run_world
from tests.support.figures import bounded, relative
from tests.support.models import tiny_qwen3_moe

pytestmark = pytest.mark.dist

VOCAB = 512
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute": (1, {"max_tokens_per_microbatch": 32, "recompute": "full"}),
    "recomputed experts": (1, {"max_tokens_per_microbatch": 32, "recompute": "selective"}),
    "tp2ep2": (2, {"parallel": {"tp": 2, "ep": 2}, "max_tokens_per_microbatch": 64}),
    "cp2": (2, {"parallel": {"cp": 2}, "max_tokens_per_microbatch": 32, "recompute": "full"}),
    "vpp2": (
        2,
        {
            "parallel": {"pp": 2, "vpp": 2},
            "max_tokens_per_microbatch": 32,
            "recompute": "selective",
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return both_ways_of_normalising(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def batches(models: dict[str, Path]) -> dict[str, Batch]:
    """Random experts with random weights; without normalisation they add up to less than 1."""
    made = {}
    for kind, scale in (("post", 1.0), ("pre", 0.6)):
        batch = make_batch(models[kind], samples=8, seed=7, vocab=VOCAB)
        batch = with_experts(batch, random_experts(batch, 11, (MOE_LAYERS, EXPERTS, TOPK)))
        made[kind] = with_gates(batch, scale * random_gates(batch, 12, (MOE_LAYERS, TOPK)))
    return made


def update(
    model: Path, batch: Batch, out: Path, size: int = 1, config: dict[str, Any] | None = None
) -> dict[str, Any]:
    replay = {"routing_replay": "rollout", "routing_weights": "sampler"}
    settings = {"optimizer": ADAM, "max_tokens_per_microbatch": 10_000} | replay | (config or {})
    result = run_world(jobs.update, size, out, model=model, config=settings, batches=[batch])
    return result["metrics"][0]


@pytest.fixture(scope="module")
def one(models, batches, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("one")
    return update(models["post"], batches["post"], out), out


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_given_weights_equal_float64_autograd(kind, models, batches, tmp_path, monkeypatch):
    """The value is the sampler's; the derivative, which reaches the router, its own."""
    ours = update(models[kind], batches[kind], tmp_path)
    ForcedGates(monkeypatch, weighs=True)
    adam = {"lr": ADAM["lr"], "eps": ADAM["eps"], "clip": ADAM["clip_grad"]}
    exact = oracle_update(models[kind], batches[kind], **adam)
    for key, value in {"loss": exact.loss, "grad_norm": exact.grad_norm}.items():
        gap = relative(ours[key], value)
        bounded(f"given gates against float64 autograd: {key} (relative)", gap, 1e-5, kind)
    gap = relative_gap(exact.weights, weights(tmp_path, 0))
    bounded("given gates against float64 autograd: weights (relative)", gap, 1e-6, kind)
    before = load_file(models[kind] / "model.safetensors")
    for name, after in weights(tmp_path, 0).items():
        if name.endswith("mlp.gate.weight"):
            assert float((after - before[name]).abs().max()) > 1e-5, f"{name} learns nothing"


def test_the_weights_matter(models, batches, tmp_path, one):
    """Control: the learner's own weights of the same experts are another update."""
    own = update(models["post"], batches["post"], tmp_path, config={"routing_weights": "learner"})
    for key in ("loss", "grad_norm", "probs_diff_mean"):
        assert relative(own[key], one[0][key]) > 1e-3, key
    # the first layer's routers see the same, so some choices are the same
    assert 0.9 < one[0]["routing_moved_fraction"] < 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_given_weights_are_the_same_in_every_layout(name, models, batches, tmp_path, one):
    size, config = LAYOUTS[name]
    ours, (expected, reference) = (
        update(models["post"], batches["post"], tmp_path, size, config),
        one,
    )
    for key in ("loss", "grad_norm", "reverse_kl_nats", "probs_diff_mean"):
        gap = relative(ours[key], expected[key])
        bounded(f"given gates against one rank: {key} (relative)", gap, 1e-5, name)
    gap = relative_gap(weights(reference, 0), weights(tmp_path, 0))
    bounded("given gates against one rank: updated weights (relative)", gap, 1e-5, name)


def test_balancing_losses_see_the_routers_own_weights(tmp_path):
    """Of the only layer with experts, whose input the given weights do not change: bitwise."""
    shape = {"num_experts": EXPERTS, "num_experts_per_tok": TOPK, "mlp_only_layers": [1]}
    model = tiny_qwen3_moe(tmp_path / "model", seed=6, **shape)
    batch = make_batch(model, samples=4, seed=8, vocab=VOCAB)
    batch = with_experts(batch, random_experts(batch, 13, (1, EXPERTS, TOPK)))
    batch = with_gates(batch, random_gates(batch, 14, (1, TOPK)))
    found = {}
    for source in ("learner", "sampler"):
        config = {"megatron": BALANCED, "routing_weights": source}
        found[source] = update(model, batch, tmp_path / source, config=config)
    learner, sampler = found["learner"], found["sampler"]
    assert learner["balancing_loss"] == sampler["balancing_loss"] > 1
    assert relative(learner["loss"], sampler["loss"]) > 1e-3


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda g: None, "routing_weights is sampler, but the samples carry no gate weights"),
        (lambda g: 0.9 * g, "must add up to 1 for this model \\(norm_topk_prob\\), but .* by 0.1"),
    ],
)
def test_bad_weights_are_refused(broken, message, models, batches, tmp_path):
    batch = batches["post"]
    samples = tuple(
        replace(s, rollout=replace(s.rollout, gates_XLk=broken(np.asarray(s.rollout.gates_XLk))))
        for s in batch.samples
    )
    with pytest.raises(AssertionError, match=message):
        update(models["post"], replace(batch, samples=samples), tmp_path)
