"""Updates on trajectories in every parallel layout, against each other and against float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_opd.records.types import Batch
from tests.dist import jobs
from tests.dist.caches import (
    OracleUpdate,
    chosen,
    load_float64,
    make_batch,
    oracle_update,
    response_logp,
    turn_advantages,
    with_turn_rewards,
)
from tests.dist.layouts import ADAM, LAYOUTS, Layout, gaps, relative_gap, run, weights
from tests.dist.worlds import run_world
from tests.support.figures import bounded, relative
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

VOCAB = 512
UPDATES = 2  # the second comes from weights and moments that the first has moved
GROUP = 4
SHARE = 2.0  # of the rewards; a smaller one cancels most of a batch's loss, which is compared
BY_TURN = {
    "objective": {
        "type": "mixture",
        "terms": [
            {"objective": {"type": "reverse_kl"}},
            {"coefficient": SHARE, "objective": {"type": "grpo", "trust": {"type": "none"}}},
        ],
    },
    "credit": "turn",
}
# The dense model also learns from the rewards of turns, the mixture of experts from the teacher.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "dense": {"estimator": BY_TURN, "group_size": GROUP},
    "moe": {},
}
# A dense model in every layout is tools/layout_table.py's; here each axis once.
CASES = [
    *(("dense", name, "packed") for name in ("one rank", "tp2", "cp2", "pp2 vpp2", "tp2 pp2")),
    ("dense", "dp2 overlapped", "packed"),
    *(("moe", name, "packed") for name in LAYOUTS),
    ("moe", "one rank", "alone"),
    ("moe", "one rank", "recompute"),
    ("moe", "tp2 cp2", "recompute"),
    ("moe", "one rank", "balanced"),
    *(("moe", name, "balanced") for name in ("tp2", "tp2 etp1", "cp2", "pp2 vpp2", "dp2 ep2")),
]


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
            with_turn_rewards(
                make_batch(models[kind], samples=8, seed=seed, vocab=VOCAB, update=update, turns=6),
                seed,
            )
            for update, seed in enumerate(range(7, 7 + UPDATES))
        ]
        for kind in ("dense", "moe")
    }


def oracle_of(kind: str, model: Path, batch: Batch, credited: Batch | None = None) -> OracleUpdate:
    """Of the kind's estimator. credited: whose rewards are read, if not the batch's own."""
    advantages = None
    if kind == "dense":
        advantages = [SHARE * own_T for own_T in turn_advantages(credited or batch, GROUP)]
    lr, eps, clip = ADAM["lr"], ADAM["eps"], ADAM["clip_grad"]
    return oracle_update(model, batch, lr=lr, eps=eps, clip=clip, advantages=advantages)


@pytest.fixture(scope="module")
def runs(
    models: dict[str, Path],
    batches: dict[str, list[Batch]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str, str], tuple[list[dict[str, Any]], Path]]:
    """Metrics and directory of the updates by case."""
    base = tmp_path_factory.mktemp("runs")
    found = {}
    for kind, name, variant in CASES:
        out = base / f"{kind}-{name}-{variant}"
        more = ESTIMATORS[kind]
        metrics = run(LAYOUTS[name], variant, models[kind], batches[kind], out, **more)
        found[kind, name, variant] = (metrics, out)
    return found


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_every_layout_makes_the_same_updates(kind, runs):
    for (model, name, variant), (ours, out) in runs.items():
        balanced = "balanced" if variant == "balanced" else "packed"
        exact, reference = runs[model, "one rank", balanced]
        if model != kind or out == reference:
            continue
        for key, gap in gaps(ours, out, exact, reference).items():
            bounded(f"layouts against one rank: {key} (relative)", gap, 1e-5, (name, variant))
        for mine, theirs in zip(ours, exact, strict=True):
            for key in ("num_response_tokens", "num_ids", "num_samples", "mismatch_tokens"):
                assert mine[key] == theirs[key], (name, key)
            assert mine["ratio_p99"] == pytest.approx(theirs["ratio_p99"], rel=0.05)
            assert mine["ratio_max"] == pytest.approx(theirs["ratio_max"], rel=1e-4)
            if balanced == "balanced":
                gap = relative(mine["balancing_loss"], theirs["balancing_loss"])
                bounded("layouts against one rank: balancing loss (relative)", gap, 1e-5, name)


@pytest.mark.parametrize("variant", ["packed", "recompute"])
def test_ranks_that_share_key_value_heads_make_the_same_updates(variant, tmp_path):
    """Four ranks, one key-value head: a rank's rows begin and end within a head."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    model = tiny_qwen3_moe(tmp_path / "model", seed=8, **heads)
    batches = [make_batch(model, samples=4, seed=5, vocab=VOCAB, update=i) for i in range(UPDATES)]
    exact = run(LAYOUTS["one rank"], "packed", model, batches, tmp_path / "one")
    ours = run(Layout({"tp": 4}), variant, model, batches, tmp_path / "four")
    for key, gap in gaps(ours, tmp_path / "four", exact, tmp_path / "one").items():
        bounded(f"layouts against one rank: {key} (relative)", gap, 1e-5, f"tp4 {variant}")
    # the shared head's weights have learnt, as much as with one rank
    before, after = load_file(model / "model.safetensors"), weights(tmp_path / "four", UPDATES - 1)
    whole = weights(tmp_path / "one", UPDATES - 1)
    for name in (name for name in before if "k_proj" in name or "v_proj" in name):
        moved = relative_gap({name: before[name]}, {name: after[name]})
        assert relative_gap({name: whole[name]}, {name: after[name]}) < 1e-3 * moved, name


def test_balancing_losses_matter(runs):
    balanced, _ = runs["moe", "one rank", "balanced"]
    plain, _ = runs["moe", "one rank", "alone"]
    assert balanced[0]["balancing_loss"] > 1
    assert plain[0]["balancing_loss"] is None
    assert relative(balanced[0]["grad_norm"], plain[0]["grad_norm"]) > 1e-3


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_export_after_a_step_is_not_stale(kind, runs, models):
    before = load_file(models[kind] / "model.safetensors")
    for (model, name, _), (_, out) in runs.items():
        if model == kind:
            assert relative_gap(before, weights(out, 0)) > 3e-4, name
            assert relative_gap(weights(out, 0), weights(out, 1)) > 3e-4, name


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_first_update_equals_float64_autograd(kind, runs, models, batches):
    metrics, out = runs[kind, "one rank", "packed"]
    exact = oracle_of(kind, models[kind], batches[kind][0])
    expected = {
        "loss": exact.loss,
        "reverse_kl_nats": exact.reverse_kl,
        "grad_norm": exact.grad_norm,
    }
    limits = {"loss": 1e-5, "reverse_kl_nats": 1e-5, "grad_norm": 1e-6}
    for key, value in expected.items():
        gap = relative(metrics[0][key], value)
        bounded(f"one rank against float64 autograd: {key} (relative)", gap, limits[key], kind)
    gap = relative_gap(exact.weights, weights(out, 0))
    bounded("one rank against float64 autograd: updated weights (relative)", gap, 1e-6, kind)


def test_truncation_temperature_and_mini_batches(models, tmp_path):
    """Two mini-batches of one batch are two optimizer steps on its halves, in admission order."""
    batch = make_batch(models["moe"], samples=8, seed=9, vocab=VOCAB, temperature=0.7)
    correction = {"correction": {"type": "truncated", "max_ratio": 1.1}}
    settings = {"estimator": correction, "temperature": 0.7, "model": models["moe"]}
    config = {"optimizer": ADAM, "num_mini_batches": 2}
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
    assert figures[0]["probs_diff_max"] < 1e-5
    assert figures[1]["mismatch_tokens"] == 0
    assert figures[1]["probs_diff_max"] is None
    assert figures[1]["probs_diff_mean"] is None
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
    exact = runs["moe", "one rank", "packed"][0][0]
    assert result["metrics"][0]["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert (
        relative_gap(weights(runs["moe", "one rank", "packed"][1], 0), weights(tmp_path, 0)) < 5e-3
    )


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


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_mask_that_is_shifted_by_one_position_is_noticed(kind, runs, models, batches):
    """The oracle's own: the limits above would find it."""
    shifted = []
    for sample in batches[kind][0].samples:
        moved = [
            msgspec.structs.replace(run, start=run.start - 1, stop=run.stop - 1)
            if run.start > 1
            else run
            for run in sample.rollout.runs
        ]
        shifted.append(replace(sample, rollout=replace(sample.rollout, runs=tuple(moved))))
    wrong = oracle_of(kind, models[kind], replace(batches[kind][0], samples=tuple(shifted)))
    metrics, out = runs[kind, "one rank", "packed"]
    assert relative(metrics[0]["loss"], wrong.loss) > 1e-2
    assert relative_gap(wrong.weights, weights(out, 0)) > 1e-4


def test_a_reward_that_is_given_to_another_turn_is_noticed(runs, models, batches):
    """The oracle's own, as above: every reward of a trajectory one turn earlier."""
    batch = batches["dense"][0]
    moved = [
        replace(s, rollout=replace(s.rollout, turns=(*s.rollout.turns[1:], s.rollout.turns[0])))
        for s in batch.samples
    ]
    wrong = oracle_of("dense", models["dense"], batch, replace(batch, samples=tuple(moved)))
    metrics, out = runs["dense", "one rank", "packed"]
    assert relative(metrics[0]["loss"], wrong.loss) > 1e-2
    assert relative_gap(wrong.weights, weights(out, 0)) > 1e-4
