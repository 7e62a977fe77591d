"""Routing replay: forced experts in every layout, against float64 and against a recording."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_opd.records.types import Batch, VersionSpan
from tests.dist import caches, jobs, routing_jobs
from tests.dist.caches import (
    chosen,
    load_float64,
    make_batch,
    oracle_update,
    response_logp,
    with_experts,
)
from tests.dist.forced_gates import EXPERTS, MOE_LAYERS, TOPK, ForcedGates, both_ways_of_normalising
from tests.dist.layouts import ADAM, BALANCED, OVERLAP, relative_gap, weights
from tests.dist.worlds import run_world
from tests.support.figures import bounded, relative
from tests.support.models import tiny_qwen3

pytestmark = pytest.mark.dist

VOCAB = 512
FREE = ("probs_diff_free_max", "probs_diff_free_mean")
NOISE = {"hidden_dropout": 0.1, "moe_input_jitter_eps": 0.01}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"max_tokens_per_microbatch": 10_000}),
    "recompute": (1, {"max_tokens_per_microbatch": 32, "recompute": "full"}),
    "recomputed experts": (
        1,
        {
            "max_tokens_per_microbatch": 32,
            "recompute": "selective",
        },
    ),
    "tp2": (2, {"parallel": {"tp": 2}, "max_tokens_per_microbatch": 64, "recompute": "full"}),
    "pp2": (2, {"parallel": {"pp": 2}, "max_tokens_per_microbatch": 32}),
    "pp2 recompute": (
        2,
        {"parallel": {"pp": 2}, "max_tokens_per_microbatch": 32, "recompute": "full"},
    ),
    "vpp2": (
        2,
        {"parallel": {"pp": 2, "vpp": 2}, "max_tokens_per_microbatch": 32, "recompute": "full"},
    ),
    "vpp2 recomputed experts": (
        2,
        {
            "parallel": {"pp": 2, "vpp": 2},
            "max_tokens_per_microbatch": 32,
            "recompute": "selective",
        },
    ),
    "cp2": (2, {"parallel": {"cp": 2}, "max_tokens_per_microbatch": 32, "recompute": "full"}),
    "ep2": (2, {"parallel": {"dp": 2, "ep": 2}, "max_tokens_per_microbatch": 64}),
    "tp2ep2": (2, {"parallel": {"tp": 2, "ep": 2}, "max_tokens_per_microbatch": 64}),
    "tp2cp2": (4, {"parallel": {"tp": 2, "cp": 2}, "max_tokens_per_microbatch": 32}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return both_ways_of_normalising(tmp_path_factory.mktemp("models"))


def random_experts(batch: Batch, seed: int) -> np.ndarray:
    return caches.random_experts(batch, seed, (MOE_LAYERS, EXPERTS, TOPK))


@pytest.fixture(scope="module")
def batches(models: dict[str, Path]) -> dict[str, Batch]:
    made = {}
    for kind, model in models.items():
        batch = make_batch(model, samples=8, seed=7, vocab=VOCAB)
        made[kind] = with_experts(batch, random_experts(batch, 11))
    return made


@pytest.fixture(scope="module")
def runs(models, batches, tmp_path_factory) -> dict[str, tuple[dict[str, Any], Path]]:
    """The first update with random experts, by layout, and what it would be without them."""
    base, found = tmp_path_factory.mktemp("runs"), {}
    for name, (size, config) in LAYOUTS.items():
        out = base / name.replace(" ", "-")
        compared = config | {"routing_compare_every": 1}
        found[name] = (update(models["post"], batches["post"], out, size, compared), out)
    return found


def update(
    model: Path, batch: Batch, out: Path, size: int = 1, config: dict[str, Any] | None = None
) -> dict[str, Any]:
    settings = {"optimizer": ADAM, "routing_replay": "rollout"} | (config or {})
    result = run_world(jobs.update, size, out, model=model, config=settings, batches=[batch])
    return result["metrics"][0]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_forced_experts_are_the_same_in_every_layout(name, runs):
    (expected, reference), (ours, out) = runs["one"], runs[name]
    for key in ("loss", "grad_norm", "reverse_kl_nats"):
        gap = relative(ours[key], expected[key])
        bounded(f"forced experts against one rank: {key} (relative)", gap, 1e-5, name)
    gap = relative_gap(weights(reference, 0), weights(out, 0))
    bounded("forced experts against one rank: updated weights (relative)", gap, 1e-5, name)
    assert ours["routing_moved_fraction"] == pytest.approx(
        expected["routing_moved_fraction"], abs=1e-12
    )
    # One of 56 triples is what the router would have chosen.
    assert 0.9 < ours["routing_moved_fraction"] < 1


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_the_mismatch_without_replay_is_the_same_in_every_layout(name, runs):
    ours, expected = runs[name][0], runs["one"][0]
    assert ours["mismatch_tokens"] == expected["mismatch_tokens"] > 0
    for key in FREE:
        gap = relative(ours[key], expected[key])
        bounded(f"{key} against one rank (relative)", gap, 1e-5, name)
        assert relative(ours[key], ours[key.replace("free_", "")]) > 1e-3, "replay must matter"


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_forced_experts_equal_float64_autograd(kind, models, batches, tmp_path, monkeypatch):
    """Gates are the router's own probabilities of the given experts, gradients included."""
    ours = update(models[kind], batches[kind], tmp_path)
    ForcedGates(monkeypatch)
    exact = oracle_update(
        models[kind], batches[kind], lr=ADAM["lr"], eps=ADAM["eps"], clip=ADAM["clip_grad"]
    )
    for key, value in {"loss": exact.loss, "grad_norm": exact.grad_norm}.items():
        gap = relative(ours[key], value)
        bounded(f"forced experts against float64 autograd: {key} (relative)", gap, 1e-5, kind)
    gap = relative_gap(exact.weights, weights(tmp_path, 0))
    bounded("forced experts against float64 autograd: weights (relative)", gap, 1e-6, kind)
    before = load_file(models[kind] / "model.safetensors")
    for name, after in weights(tmp_path, 0).items():
        if name.endswith("mlp.gate.weight"):
            assert float((after - before[name]).abs().max()) > 1e-5, f"{name} learns nothing"


def look(
    model: Path, batch: Batch, out: Path, **config: Any
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    settings = {"optimizer": ADAM, "max_tokens_per_microbatch": 64} | config
    result = run_world(
        routing_jobs.look_and_train, 1, out, model=model, config=settings, batch=batch, estimator={}
    )
    return result["metrics"][0], torch.load(out / "logits.pt")


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_replayed_recording_is_bitwise_the_same(recompute, models, batches, tmp_path):
    model, batch = models["post"], batches["post"]
    runs = {"off": look(model, batch, tmp_path / "off", recompute=recompute)}
    current = {"recompute": recompute, "routing_replay": "current"}
    runs["current"] = look(model, batch, tmp_path / "current", **current)
    own = with_experts(batch, np.load(tmp_path / "current" / "experts.npy"))
    rollout = {"recompute": recompute, "routing_replay": "rollout", "routing_compare_every": 1}
    runs["rollout"] = look(model, own, tmp_path / "rollout", **rollout)
    expected, logits = runs["off"]
    count = len(logits)
    assert count > 1
    assert len(runs["current"][1]) == 2 * count  # recorded, then replayed
    for name in ("current", "rollout"):
        figures, found = runs[name]
        assert all(torch.equal(a, b) for a, b in zip(logits, found[:count], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(logits, found[-count:], strict=True))
        assert (figures["loss"], figures["grad_norm"]) == (expected["loss"], expected["grad_norm"])
        after, exact = weights(tmp_path / name, 0), weights(tmp_path / "off", 0)
        assert all(torch.equal(after[key], exact[key]) for key in exact)
    assert expected["routing_moved_fraction"] is None
    assert runs["rollout"][0]["routing_moved_fraction"] == 0
    for key in FREE:
        assert expected[key] is runs["current"][0][key] is None
        assert runs["rollout"][0][key] == expected[key.replace("free_", "")]
    # Control: other experts are other logits.
    _, others = look(model, batch, tmp_path / "others", **rollout)
    gap = max(float((a - b).abs().max()) for a, b in zip(logits, others, strict=True))
    assert gap > 0.1


def sampled_by_itself(model: Path, batch: Batch) -> Batch:
    """Of version 1, the first half of the samples of version 0: the sampler rounds as float64."""
    exact, samples = load_float64(model), []
    for index, sample in enumerate(batch.samples):
        rollout = sample.rollout
        with torch.no_grad():
            own = chosen(response_logp(exact, sample), rollout.draws).numpy().astype(np.float32)
        draws = replace(rollout.draws, sampler_logp_N=own)
        span = VersionSpan(int(index >= len(batch.samples) // 2), 0, draws.num_tokens)
        samples.append(replace(sample, rollout=replace(rollout, draws=draws, spans=(span,))))
    return replace(batch, version=1, samples=tuple(samples))


def test_the_mismatch_with_replay_and_without(models, batches, tmp_path):
    """Other experts than the sampler's are far off, the learner's own are not; same tokens."""
    model, compare = models["post"], {"routing_compare_every": 1}
    batch = sampled_by_itself(model, batches["post"])
    others = update(model, batch, tmp_path / "others", config=compare)
    fresh = sum(len(sample.rollout.response_ids_T) for sample in batch.samples[4:])
    assert others["mismatch_tokens"] == fresh < batch.num_response_tokens
    bounded("max |dp| to float64, routing free", others["probs_diff_free_max"], 1e-6)
    assert others["probs_diff_max"] > 1e3 * others["probs_diff_free_max"]
    assert others["probs_diff_mean"] > 1e3 * others["probs_diff_free_mean"]
    look(model, batch, tmp_path / "current", routing_replay="current")
    own = with_experts(batch, np.load(tmp_path / "current" / "experts.npy"))
    recorded = update(model, own, tmp_path / "own", config=compare)
    for key in FREE:
        assert recorded[key] == recorded[key.replace("free_", "")], key
        bounded(
            f"{key}: one rounding or another (relative)", relative(recorded[key], others[key]), 1e-3
        )
    nothing = update(model, replace(batch, version=2), tmp_path / "stale", config=compare)
    assert nothing["mismatch_tokens"] == 0
    assert all(nothing[key] is nothing[key.replace("free_", "")] is None for key in FREE)


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (1, {"recompute": "full", "num_mini_batches": 2, "megatron": NOISE}),
        (2, {"parallel": {"tp": 2}, "megatron": NOISE}),
        (2, {"parallel": {"dp": 2, "ep": 2}, "ddp": OVERLAP}),
        (1, {"megatron": BALANCED}),
    ],
)
def test_training_does_not_notice_the_comparison(size, config, models, batches, tmp_path):
    """Bitwise, dropout and jitter included: every second of three updates is compared."""
    three = [replace(batches["post"], update=number) for number in range(3)]
    settings = {
        "optimizer": ADAM,
        "routing_replay": "rollout",
        "max_tokens_per_microbatch": 64,
    } | config
    rows = {}
    for every in (0, 2):
        rows[every] = run_world(
            jobs.update,
            size,
            tmp_path / str(every),
            model=models["post"],
            config=settings | {"routing_compare_every": every},
            batches=three,
        )["metrics"]
    assert [[row[key] is None for row in rows[2]] for key in FREE] == [[False, True, False]] * 2
    noticed = ("_s", "_bytes", "tflops_per_rank", "mfu", *FREE)
    for plain, compared in zip(rows[0], rows[2], strict=True):
        for key in plain:
            assert key.endswith(noticed) or plain[key] == compared[key], key
    for number in range(3):
        after, exact = (weights(tmp_path / name, number) for name in ("2", "0"))
        assert all(torch.equal(after[key], exact[key]) for key in exact)


def test_current_keeps_the_routing_of_the_batchs_start(models, batches, tmp_path):
    """Bitwise what its own recording replayed does in both mini-batches; off goes other ways."""
    model, batch = models["post"], batches["post"]
    fast = {"optimizer": ADAM | {"lr": 3e-2}, "num_mini_batches": 2}
    current, _ = look(model, batch, tmp_path / "current", routing_replay="current", **fast)
    own = with_experts(batch, np.load(tmp_path / "current" / "experts.npy"))
    rollout, _ = look(model, own, tmp_path / "rollout", routing_replay="rollout", **fast)
    off, _ = look(model, batch, tmp_path / "off", **fast)
    for key in ("loss", "grad_norm"):
        assert current[key] == rollout[key], key
    # of two mini-batches the first, whose routers choose the same, is replayed by one alone
    assert 0.01 < rollout["routing_moved_fraction"] < current["routing_moved_fraction"] < 0.8
    after, exact = (weights(tmp_path / name, 0) for name in ("current", "rollout"))
    assert all(torch.equal(after[key], exact[key]) for key in exact)
    assert relative_gap(exact, weights(tmp_path / "off", 0)) > 1e-3
    assert off["loss"] != current["loss"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda e: None, "carry no routed experts"),
        (lambda e: e[:, :2], "must be 3 layers of 3 experts a token, got \\(2, 3\\)"),
        (lambda e: e + 1, "must be below 8, got 8"),
        (lambda e: e * 0, "must differ, got one twice"),
    ],
)
def test_bad_experts_are_refused(broken, message, models, batches, tmp_path):
    batch = batches["post"]
    samples = tuple(
        replace(s, rollout=replace(s.rollout, experts_XLk=broken(s.rollout.experts_XLk)))
        for s in batch.samples
    )
    with pytest.raises(AssertionError, match=message):
        update(models["post"], replace(batch, samples=samples), tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "must be off for a student without experts, got rollout"),
        ({"megatron": {"moe_router_load_balancing_type": "sinkhorn"}}, "must not be 'sinkhorn'"),
    ],
)
def test_what_cannot_replay_is_refused(config, message, models, batches, tmp_path):
    model = models["post"] if config else tiny_qwen3(tmp_path / "dense", seed=1)
    with pytest.raises(AssertionError, match=message):
        update(model, batches["post"], tmp_path / "out", config=config)
