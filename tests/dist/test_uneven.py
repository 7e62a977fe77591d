"""Ranks that do not divide a mini-batch: the update of one rank, also where some run fillers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.batching.plan import learner_plan
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.records.types import Batch
from tests.dist import caches, jobs, uneven_jobs
from tests.dist.caches import make_batch, with_experts
from tests.dist.layouts import ADAM, BALANCED, OVERLAP, gaps
from tests.dist.worlds import run_world
from tests.support.figures import bounded, relative
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

VOCAB, LAYERS, EXPERTS, TOPK = 512, 4, 6, 2
MINI = 64
# Fewer samples, that every axis may meet a filler: mini-batches of 7 on two ranks.
FEW, MINIS = 7, 2
ALONE = {"max_tokens_per_microbatch": 1}
REPLAYED = {"routing_replay": "rollout", "recompute": "full", "megatron": BALANCED}
Result = tuple[list[dict[str, Any]], Path]
# The model, whether it is a batch of few samples, the learner's keys.
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "dense one rank": ("dense", False, {"max_tokens_per_microbatch": 256}),
    "dense dp3": ("dense", False, {"parallel": {"dp": 3}, "max_tokens_per_microbatch": 256}),
    "dense dp3 overlapped alone": ("dense", False, {"parallel": {"dp": 3}, "ddp": OVERLAP} | ALONE),
    "moe one rank": ("moe", False, REPLAYED | ALONE),
    "moe dp3 ep3": ("moe", False, {"parallel": {"dp": 3, "ep": 3}} | REPLAYED | ALONE),
}
AXES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp2 ep2": {"parallel": {"dp": 2, "ep": 2}, "ddp": OVERLAP},
    "tp2 dp2 ep2": {"parallel": {"tp": 2, "dp": 2, "ep": 2}},
    "cp2 dp2": {"parallel": {"cp": 2, "dp": 2}},
    "pp2 vpp2 dp2 ep2": {"parallel": {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}},
}
CASES |= {
    f"few {name}": ("moe", True, keys | REPLAYED | ALONE | {"num_mini_batches": MINIS})
    for name, keys in AXES.items()
}
# The log-probs of the batch's start, and a limit that all actions of a mini-batch decide.
M2 = {
    "objective": {"type": "reverse_kl", "trust": {"type": "m2", "threshold": 1e-4}},
    "correction": {"type": "truncated", "max_ratio": 1.5, "prox": True},
    "reduction": {"type": "sequence_mean"},
}
COUNTS = (
    "num_response_tokens",
    "num_ids",
    "num_samples",
    "mismatch_tokens",
    "routing_moved_fraction",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "dense": tiny_qwen3(base / "dense", seed=3, num_hidden_layers=LAYERS),
        "moe": tiny_qwen3_moe(base / "moe", seed=4, num_hidden_layers=LAYERS, num_experts=EXPERTS),
    }


@pytest.fixture(scope="module")
def batches(models: dict[str, Path]) -> dict[str, Batch]:
    """Of one mini-batch; routed at random."""
    made = {}
    for kind, model in models.items():
        made[kind] = make_batch(model, samples=MINI, seed=7, vocab=VOCAB)
    experts = caches.random_experts(made["moe"], 11, (LAYERS, EXPERTS, TOPK))
    return made | {"moe": with_experts(made["moe"], experts)}


def batches_of(batches: dict[str, Batch], kind: str, few: bool) -> list[Batch]:
    """Of the dense model's two the first leaves no rank without a sample to compute.

    Megatron notes in it in which order gradients become ready, and waits for the same ones later.
    """
    whole = batches[kind]
    if few:
        return [replace(whole, samples=whole.samples[: MINIS * FEW])]
    if kind == "moe":
        return [whole]
    even = replace(whole, samples=whole.samples[: MINI - 1])
    return [even, replace(whole, update=1, version=1)]


@pytest.fixture(scope="module")
def runs(
    models: dict[str, Path], batches: dict[str, Batch], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    base, found = tmp_path_factory.mktemp("runs"), {}
    for name, (kind, few, keys) in CASES.items():
        out = base / name.replace(" ", "-")
        parallel = LearnerConfig.model_validate(keys).parallel
        metrics = run_world(
            jobs.update,
            parallel.world_size,
            out,
            model=models[kind],
            config={"optimizer": ADAM} | keys,
            batches=batches_of(batches, kind, few),
            estimator=M2 if few else None,
        )["metrics"]
        found[name] = (metrics, out)
    return found


def reference_of(name: str) -> str:
    return f"{name.split()[0]} one rank"


@pytest.mark.parametrize("name", [name for name in CASES if "one rank" not in name])
def test_uneven_shares_make_the_update_of_one_rank(name: str, runs: dict[str, Result]):
    (ours, out), (exact, reference) = runs[name], runs[reference_of(name)]
    for key, gap in gaps(ours, out, exact, reference).items():
        bounded(f"uneven shares against one rank: {key} (relative)", gap, 1e-5, name)
    for mine, theirs in zip(ours, exact, strict=True):
        for key in COUNTS:
            assert mine[key] == theirs[key], key
        if theirs["balancing_loss"] is not None:
            gap = relative(mine["balancing_loss"], theirs["balancing_loss"])
            bounded("uneven shares against one rank: balancing loss (relative)", gap, 1e-5, name)


@pytest.mark.parametrize("name", [name for name in CASES if "one rank" not in name])
def test_the_shares_are_uneven_and_some_rank_runs_a_filler(name: str, batches: dict[str, Batch]):
    kind, few, keys = CASES[name]
    samples = batches_of(batches, kind, few)[-1].samples
    lengths = [sample.rollout.num_tokens for sample in samples]
    plan = learner_plan([[n] for n in lengths], LearnerConfig.model_validate(keys))
    for mini in plan:
        held = sorted(sum(map(len, micros)) for micros in mini)
        assert held == ([3, 4] if few else [21, 21, 22])
    fillers = sum(not micro for mini in plan for micros in mini for micro in micros)
    # 64 samples alone fill 66 places, twice 7 fill 16
    assert fillers == (0 if name == "dense dp3" else 2)


def test_the_few_are_bounded_and_balanced(runs: dict[str, Result]):
    ((figures,), _) = runs["few one rank"]
    assert 0 < figures["stopped_fraction"] < 1
    assert figures["balancing_loss"] > 1


def test_a_mean_of_means_is_another_update(
    models: dict[str, Path], batches: dict[str, Batch], runs: dict[str, Result], tmp_path: Path
):
    """Control: the same shares, each normalised by its own tokens."""
    keys = CASES["dense dp3"][2]
    ours = run_world(
        uneven_jobs.mean_of_means,
        3,
        tmp_path,
        model=models["dense"],
        config={"optimizer": ADAM} | keys,
        batches=batches_of(batches, "dense", few=False),
    )["metrics"]
    exact, reference = runs["dense one rank"]
    found = gaps(ours, tmp_path, exact, reference)
    assert found["weights"] > 1e-5
    assert found["grad_norm"] > 1e-4
