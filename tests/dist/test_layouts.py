"""One update in every parallel layout, against each other and against float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_opd.types import Batch
from tests.dist import jobs
from tests.dist.caches import (
    chosen,
    load_float64,
    make_batch,
    oracle_update,
    response_logp,
)
from tests.dist.worlds import run_world
from tests.figures import bounded, relative
from tests.models import tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

VOCAB = 512
ADAM = {"lr": 1e-3, "eps": 1e-3, "clip_grad": 0.5}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"tokens_per_microbatch": 10_000}),
    "alone": (1, {"tokens_per_microbatch": 1, "recompute": True}),
    "tp2": (2, {"parallel": {"tp": 2}, "tokens_per_microbatch": 64}),
    "pp2": (2, {"parallel": {"pp": 2}, "tokens_per_microbatch": 64}),
    "dp2": (2, {"parallel": {"dp": 2}, "tokens_per_microbatch": 64}),
    "ep2": (2, {"parallel": {"dp": 2, "ep": 2}, "tokens_per_microbatch": 64}),
    "tp2ep2": (4, {"parallel": {"tp": 2, "dp": 2, "ep": 2}, "tokens_per_microbatch": 64}),
}
VPP = {"pp": 2, "vpp": 2}
LAYOUTS |= {
    "cp2": (2, {"parallel": {"cp": 2}, "tokens_per_microbatch": 32}),
    "vpp2": (2, {"parallel": VPP, "tokens_per_microbatch": 64}),
    "cp2dp2": (4, {"parallel": {"cp": 2, "dp": 2}, "tokens_per_microbatch": 32}),
    "tp2pp2": (4, {"parallel": {"tp": 2, "pp": 2}, "tokens_per_microbatch": 64}),
    "tp2cp2": (4, {"parallel": {"tp": 2, "cp": 2}, "tokens_per_microbatch": 32, "recompute": True}),
    "pp2ep2": (4, {"parallel": {"pp": 2, "dp": 2, "ep": 2}, "tokens_per_microbatch": 64}),
    "tp2ep2 on two ranks": (2, {"parallel": {"tp": 2, "ep": 2}, "tokens_per_microbatch": 64}),
    "cp2ep2 on two ranks": (2, {"parallel": {"cp": 2, "ep": 2}, "tokens_per_microbatch": 32}),
    "ep2 allgather": (
        2,
        {
            "parallel": {"dp": 2, "ep": 2},
            "tokens_per_microbatch": 64,
            "megatron": {"moe_token_dispatcher_type": "allgather"},
        },
    ),
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}
LAYOUTS |= {
    "dp2 overlapped": (2, {"parallel": {"dp": 2}, "tokens_per_microbatch": 64, "ddp": OVERLAP}),
    "vpp2dp2 overlapped": (
        4,
        {"parallel": VPP | {"dp": 2}, "tokens_per_microbatch": 64, "ddp": OVERLAP},
    ),
}
DENSE = (
    "one",
    "alone",
    "tp2",
    "pp2",
    "dp2",
    "cp2",
    "vpp2",
    "cp2dp2",
    "tp2pp2",
    "tp2cp2",
    "dp2 overlapped",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "dense": tiny_qwen3(base / "dense", seed=3, num_hidden_layers=4),
        "moe": tiny_qwen3_moe(base / "moe", seed=4, num_hidden_layers=4),
        "tied": tiny_qwen3(base / "tied", seed=5, tie_word_embeddings=True),
        "mixed": tiny_qwen3_moe(
            base / "mixed", seed=6, num_hidden_layers=4, mlp_only_layers=[1], num_key_value_heads=4
        ),
    }


@pytest.fixture(scope="module")
def batches(models: dict[str, Path]) -> dict[str, list[Batch]]:
    return {
        kind: [
            make_batch(models[kind], samples=8, seed=seed, vocab=VOCAB, update=update)
            for update, seed in enumerate((7, 8))
        ]
        for kind in ("dense", "moe")
    }


@pytest.fixture(scope="module")
def runs(
    models: dict[str, Path],
    batches: dict[str, list[Batch]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], tuple[dict[str, Any], Path]]:
    """Metrics and directory of two updates by (model, layout)."""
    base = tmp_path_factory.mktemp("runs")
    found = {}
    for kind in ("dense", "moe"):
        for name, (size, config) in LAYOUTS.items():
            if kind == "dense" and name not in DENSE:
                continue
            out = base / f"{kind}-{name}"
            result = run_world(
                jobs.update,
                size,
                out,
                model=models[kind],
                config=config | {"optimizer": ADAM},
                batches=batches[kind],
            )
            found[kind, name] = (result, out)
    return found


# global_aux_loss depends on the order of micro-batches by its definition (a running mean).
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "ep2", "cp2", "vpp2", "tp2 recompute"])
def test_balancing_losses_weigh_the_same_everywhere(
    layout, balanced_one, models, batches, tmp_path
):
    """One sample a micro-batch, so that every layout sees the same micro-batches."""
    size, config = LAYOUTS[layout.split()[0]]
    config = config | {"tokens_per_microbatch": 1, "recompute": "recompute" in layout}
    ours, out = balanced_update(models, batches, tmp_path, size, config)
    expected, reference = balanced_one
    for key in ("loss", "grad_norm", "balancing_loss"):
        gap = relative(ours[key], expected[key])
        bounded(f"balancing losses against one rank: {key} (relative)", gap, 1e-5, layout)
    gap = relative_gap(weights(reference, 0), weights(out, 0))
    bounded("balancing losses against one rank: updated weights (relative)", gap, 1e-5, layout)


def balanced_update(models, batches, out, size, config):
    result = run_world(
        jobs.update,
        size,
        out,
        model=models["moe"],
        config=config | {"optimizer": ADAM, "megatron": BALANCED},
        batches=batches["moe"][:1],
    )
    return result["metrics"][0], out


@pytest.fixture(scope="module")
def balanced_one(models, batches, runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("balanced")
    figures, _ = balanced_update(models, batches, out, 1, {"tokens_per_microbatch": 1})
    assert figures["balancing_loss"] > 1
    plain = runs["moe", "alone"][0]["metrics"][0]
    assert relative(figures["grad_norm"], plain["grad_norm"]) > 1e-3, "it must matter"
    return figures, out


def weights(out: Path, update: int) -> dict[str, torch.Tensor]:
    return load_file(out / f"after{update}" / "model.safetensors")


def relative_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """||a - b|| / ||a|| over all tensors."""
    assert a.keys() == b.keys()
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return (difference / sum(float(t.double().square().sum()) for t in a.values())) ** 0.5


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_every_layout_makes_the_same_updates(kind, runs):
    reference, reference_out = runs[kind, "one"]
    for (model, name), (result, out) in runs.items():
        if model != kind:
            continue
        for update in range(2):
            ours, expected = result["metrics"][update], reference["metrics"][update]
            for key in ("loss", "grad_norm", "reverse_kl_nats"):
                gap = relative(ours[key], expected[key])
                bounded(f"layouts against one rank: {key} (relative)", gap, 1e-5, (name, update))
            for key in ("num_response_tokens", "num_ids", "num_samples", "mismatch_tokens"):
                assert ours[key] == expected[key], (name, key)
            assert ours["ratio_p99"] == pytest.approx(expected["ratio_p99"], rel=0.05)
            assert ours["ratio_max"] == pytest.approx(expected["ratio_max"], rel=1e-4)
            gap = relative_gap(weights(reference_out, update), weights(out, update))
            bounded("layouts against one rank: updated weights (relative)", gap, 1e-5, name)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_export_after_a_step_is_not_stale(kind, runs, models):
    before = load_file(models[kind] / "model.safetensors")
    for (model, name), (_, out) in runs.items():
        if model == kind:
            assert relative_gap(before, weights(out, 0)) > 3e-4, name
            assert relative_gap(weights(out, 0), weights(out, 1)) > 3e-4, name


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_first_update_equals_float64_autograd(kind, runs, models, batches):
    result, out = runs[kind, "one"]
    exact = oracle_update(
        models[kind], batches[kind][0], lr=ADAM["lr"], eps=ADAM["eps"], clip=ADAM["clip_grad"]
    )
    ours = result["metrics"][0]
    expected = {
        "loss": exact.loss,
        "reverse_kl_nats": exact.reverse_kl,
        "grad_norm": exact.grad_norm,
    }
    for key, value in expected.items():
        gap = relative(ours[key], value)
        bounded(f"one rank against float64 autograd: {key} (relative)", gap, 1e-5, kind)
    gap = relative_gap(exact.weights, weights(out, 0))
    bounded("one rank against float64 autograd: updated weights (relative)", gap, 1e-6, kind)


def test_truncation_temperature_and_mini_batches(models, tmp_path):
    """Two mini-batches of one batch are two optimizer steps on its halves, in admission order."""
    batch = make_batch(models["moe"], samples=8, seed=9, vocab=VOCAB, temperature=0.7)
    correction = {"correction": {"type": "truncated", "max_ratio": 1.1}}
    settings = {"estimator": correction, "temperature": 0.7, "model": models["moe"]}
    config = {"optimizer": ADAM, "mini_batches": 2}
    whole = run_world(jobs.update, 1, tmp_path / "a", config=config, batches=[batch], **settings)
    half = replace(batch, samples=batch.samples[:4])
    first = run_world(
        jobs.update, 1, tmp_path / "b", config={"optimizer": ADAM}, batches=[half], **settings
    )
    exact = oracle_update(
        models["moe"],
        half,
        lr=ADAM["lr"],
        eps=ADAM["eps"],
        clip=ADAM["clip_grad"],
        max_ratio=1.1,
        temperature=0.7,
    )
    ours = first["metrics"][0]
    assert ours["loss"] == pytest.approx(exact.loss, rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(exact.grad_norm, rel=1e-5)
    assert 0 < ours["truncated_fraction"] < 1
    figures = whole["metrics"][0]
    assert figures["mismatch_tokens"] == half.num_response_tokens
    assert figures["num_response_tokens"] == batch.num_response_tokens
    moved = relative_gap(weights(tmp_path / "b", 0), weights(tmp_path / "a", 0))
    assert moved > 1e-4, "the second mini-batch must take a step of its own"


def with_teacher(batch: Batch, teacher: torch.nn.Module, shift: int) -> Batch:
    """On-policy cache whose teacher is the student; scores of row t come from row t + shift."""
    samples = []
    for sample in batch.samples:
        draws = sample.rollout.draws
        with torch.no_grad():
            exact_TV = response_logp(teacher, sample)
        own = chosen(exact_TV, draws).numpy().astype(np.float32)
        scores = chosen(exact_TV.roll(-shift, dims=0), draws).numpy().astype(np.float32)
        rollout = replace(sample.rollout, draws=replace(draws, sampler_logp_N=own))
        samples.append(replace(sample, rollout=rollout, teacher_logp_N=scores))
    return replace(batch, samples=tuple(samples))


def test_student_equal_to_teacher_gives_nothing_to_learn(models, batches, tmp_path):
    teacher = load_float64(models["moe"])
    figures = {}
    for shift in (0, 1):
        batch = with_teacher(batches["moe"][0], teacher, shift)
        stale = replace(batch, version=batch.version + shift)  # no token of its own version then
        result = run_world(
            jobs.update,
            1,
            tmp_path / str(shift),
            model=models["moe"],
            config={"optimizer": ADAM},
            batches=[stale],
        )
        figures[shift] = result["metrics"][0]
    bounded("student = teacher: reverse KL (nats)", abs(figures[0]["reverse_kl_nats"]), 1e-6)
    bounded("student = teacher: gradient norm", figures[0]["grad_norm"], 1e-5)
    assert figures[0]["mismatch_max_abs_dp"] < 1e-5
    assert figures[1]["mismatch_tokens"] == 0
    assert figures[1]["mismatch_max_abs_dp"] is None
    assert figures[1]["mismatch_mean_abs_dp"] is None
    # The same check must notice scores that are one row off.
    assert abs(figures[1]["reverse_kl_nats"]) > 1e-2
    assert figures[1]["grad_norm"] > 0.1


def test_bfloat16_keeps_float32_main_weights(models, batches, runs, tmp_path):
    result = run_world(
        jobs.update,
        1,
        tmp_path,
        model=models["moe"],
        config={"dtype": "bfloat16", "optimizer": ADAM},
        batches=batches["moe"][:1],
    )
    assert result["main_dtypes"] == ["torch.float32"]
    exact = runs["moe", "one"][0]["metrics"][0]
    assert result["metrics"][0]["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert relative_gap(weights(runs["moe", "one"][1], 0), weights(tmp_path, 0)) < 5e-3


@pytest.mark.parametrize(
    ("kind", "size", "parallel"),
    [
        ("tied", 1, {}),
        ("tied", 2, {"pp": 2}),
        ("tied", 2, {"tp": 2}),
        ("mixed", 2, {"pp": 2}),
        ("mixed", 4, {"tp": 2, "dp": 2, "ep": 2}),
    ],
)
def test_hugging_face_round_trip_is_bitwise(kind, size, parallel, models, tmp_path):
    run_world(jobs.round_trip, size, tmp_path, model=models[kind], config={"parallel": parallel})
    copy = load_file(tmp_path / "copy" / "model.safetensors")
    source = load_file(models[kind] / "model.safetensors")
    assert all(torch.equal(copy[name], source[name]) for name in copy)


@pytest.mark.parametrize("size", [1, 2])
def test_vocabulary_shards_give_exact_gradients(size, tmp_path):
    run_world(jobs.vocab_parallel, size, tmp_path)
