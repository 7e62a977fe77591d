"""Losses that need more than their own micro-batch: the same update in every parallel layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_opd.records.types import Batch
from tests.dist import jobs
from tests.dist.caches import make_batch
from tests.dist.worlds import run_world
from tests.support.figures import bounded, relative
from tests.support.models import tiny_qwen3

pytestmark = pytest.mark.dist

VOCAB, GROUP = 512, 4
ADAM = {"lr": 1e-3, "eps": 1e-3, "clip_grad": 0.5}
CLIP = {"type": "clip", "low": 0.02, "high": 0.02}
LIMITS = {"grad_norm": 2e-6}
# two mini-batches: the second sees a ratio to the batch's start that is not 1
ESTIMATORS: dict[str, dict[str, Any]] = {
    "ppo-tis": {
        "objective": {"type": "reverse_kl", "trust": CLIP},
        "correction": {"type": "truncated", "max_ratio": 1.1, "prox": True},
    },
    "m2po": {"objective": {"type": "reverse_kl", "trust": {"type": "m2", "threshold": 0.02}}},
    "m2po-capped": {
        "objective": {
            "type": "reverse_kl",
            "outside": "renormalise",
            "trust": {"type": "m2", "threshold": 0.02, "moment": "capped"},
        },
        "support": {"type": "topk", "k": 4},
    },
    "grpo": {
        "objective": {"type": "grpo", "trust": CLIP, "kl": {"coefficient": 0.1}},
        "support": {"type": "path"},
        "reduction": {"type": "sequence_mean"},
    },
    "gspo": {
        "objective": {"type": "gspo", "trust": CLIP},
        "support": {"type": "path"},
        "correction": {
            "type": "truncated",
            "max_ratio": 1.01,
            "level": "geometric",
            "prox": True,
        },
    },
    "gepo": {
        "objective": {
            "type": "gepo",
            "defensive": 10.0,
            "kl": {"coefficient": 0.1, "to": "sampler"},
        },
        "support": {"type": "path"},
        "reduction": {"type": "fixed_length", "length": 8},
    },
    "mixture": {
        "objective": {
            "type": "mixture",
            "terms": [
                {"coefficient": 1.0, "objective": {"type": "forward_kl"}},
                {"coefficient": 0.3, "objective": {"type": "grpo"}},
            ],
        }
    },
    # prompts that learn from rewards alone, from the teacher alone, or both; some masked
    "weighed": {
        "objective": {
            "type": "mixture",
            "terms": [
                {"objective": {"type": "reverse_kl", "trust": {"type": "m2", "threshold": 0.02}}},
                {"coefficient": 0.3, "objective": {"type": "grpo", "trust": CLIP}},
            ],
        }
    },
}
WEIGHTS = ((1.0, 0.0), (0.0, 1.0), (0.5, 2.0), (1.0, 1.0))
"""(reward weight, teacher weight) of the prompts of the estimator `weighed`, in turn."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"max_tokens_per_microbatch": 10_000}),
    "dense": (1, {"max_tokens_per_microbatch": 64, "logp": "dense"}),
    "tp2": (2, {"parallel": {"tp": 2}, "max_tokens_per_microbatch": 64}),
    "pp2": (2, {"parallel": {"pp": 2}, "max_tokens_per_microbatch": 64}),
    "cp2": (2, {"parallel": {"cp": 2}, "max_tokens_per_microbatch": 32}),
    "vpp2": (2, {"parallel": {"pp": 2, "vpp": 2}, "max_tokens_per_microbatch": 64}),
    "dp2": (2, {"parallel": {"dp": 2}, "max_tokens_per_microbatch": 64}),
}
COMPARED = (
    "loss",
    "grad_norm",
    "importance_variance",
    "correction_variance",
    "truncated_fraction",
    "stopped_fraction",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), seed=3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    made = make_batch(model, samples=16, seed=11, vocab=VOCAB)
    rng = np.random.default_rng(12)
    scored = [
        replace(
            sample,
            reward=float(rng.integers(0, 2)),
            teacher_logp_N=np.maximum(sample.teacher_logp_N, np.float32(-30.0)),
        )
        for sample in made.samples
    ]
    return replace(made, samples=tuple(scored))


def weighed(batch: Batch) -> Batch:
    """Groups of WEIGHTS; samples that no teacher is asked about have no scores."""
    found = []
    for sample in batch.samples:
        prompt, masked = sample.rollout.prompt, sample.rollout.prompt.uid % 5 == 4
        own, teacher = WEIGHTS[prompt.uid // GROUP % len(WEIGHTS)]
        prompt = replace(prompt, reward_weight=own, teacher_weight=teacher)
        scores_N = sample.teacher_logp_N
        if masked or not teacher:
            scores_N = np.full_like(scores_N, np.nan)
        rollout = replace(sample.rollout, prompt=prompt)
        found.append(replace(sample, rollout=rollout, teacher_logp_N=scores_N, masked=masked))
    return replace(batch, samples=tuple(found))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_layout_makes_the_same_update(name, model, batch, tmp_path):
    results = {}
    for layout, (size, config) in LAYOUTS.items():
        result = run_world(
            jobs.update,
            size,
            tmp_path / layout,
            model=model,
            config=config | {"optimizer": ADAM, "num_mini_batches": 2},
            batches=[weighed(batch) if name == "weighed" else batch],
            estimator=ESTIMATORS[name],
            group_size=GROUP,
        )
        weights = load_file(tmp_path / layout / "after0" / "model.safetensors")
        results[layout] = result["metrics"][0], weights
    expected, reference = results.pop("one")
    for layout, (ours, weights) in results.items():
        for key in COMPARED:
            if expected[key]:
                gap = relative(ours[key], expected[key])
                bounded(f"{name}: {key} (relative)", gap, LIMITS.get(key, 2e-5), layout)
            else:
                assert ours[key] == expected[key]
        difference = sum(
            float((weights[k] - reference[k]).double().square().sum()) for k in weights
        )
        scale = sum(float(w.double().square().sum()) for w in reference.values())
        bounded(f"{name}: weights (relative)", (difference / scale) ** 0.5, 1e-6, layout)
    if name in ("ppo-tis", "m2po", "m2po-capped", "grpo"):
        assert 0 < expected["stopped_fraction"] < 1, "the trust region must have acted"
    if name in ("ppo-tis", "gspo"):
        assert 0 < expected["truncated_fraction"] < 1
        assert expected["prox_k1_nats"] != expected["prox_k1_weighed_nats"]


@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_scoring_the_start_changes_no_update(layout, model, batch, tmp_path):
    """p0 / o is the same whatever the correction: that of a run which needs it is the oracle."""
    size, config = LAYOUTS[layout]
    start = {"score_start": True}
    needing = ESTIMATORS["m2po"] | {"correction": {"type": "none", "prox": True}}
    found = {}
    for name, estimator, more in (
        ("plain", ESTIMATORS["m2po"], {}),
        ("scored", ESTIMATORS["m2po"], start),
        ("needing", needing, {}),
    ):
        result = run_world(
            jobs.update,
            size,
            tmp_path / name,
            model=model,
            config=config | more | {"optimizer": ADAM, "num_mini_batches": 2},
            batches=[batch],
            estimator=estimator,
            group_size=GROUP,
        )
        weights = load_file(tmp_path / name / "after0" / "model.safetensors")
        found[name] = result["metrics"][0], weights
    (plain, before), (scored, after), (oracle, _) = found.values()
    assert all(torch.equal(before[key], after[key]) for key in before)
    started = ("sampler_start_k1_nats", "sampler_start_k3_nats", "prox_k1_nats")
    assert all(plain[key] is None for key in started)
    for key in started[:2]:
        assert scored[key] == pytest.approx(oracle[key], rel=1e-6)
    assert scored["prox_k1_nats"] != 0, "the second mini-batch has moved"
    assert {k: v for k, v in scored.items() if "prox" not in k and "start" not in k}.keys() == {
        k for k in plain if "prox" not in k and "start" not in k
    }
    assert scored["loss"] == plain["loss"]
    assert scored["grad_norm"] == plain["grad_norm"]
