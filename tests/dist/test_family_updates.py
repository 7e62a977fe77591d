"""Parts that some families have alone: updates against float64, and in every kind of layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_opd.records.types import Batch
from tests.dist.caches import make_batch, oracle_update
from tests.dist.layouts import ADAM, LAYOUTS, gaps, relative_gap, run, weights, wrong_part
from tests.support.delta_models import tiny_qwen3_5, tiny_qwen3_5_moe
from tests.support.figures import bounded, relative
from tests.support.latent_models import tiny_deepseek_v3
from tests.support.models import (
    YARN_ROPE,
    tiny_gemma3,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_llama,
    tiny_minimax_m2,
    tiny_olmo3,
    tiny_phi3,
    tiny_qwen2_moe,
)

pytestmark = pytest.mark.dist

MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "qwen2 moe": (tiny_qwen2_moe, {}),
    "glm 4.5": (tiny_glm4_moe, {"num_hidden_layers": 4}),
    "deepseek v3": (tiny_deepseek_v3, {}),
    # a state that every segment begins anew, gates, norms around 0
    "qwen3.5": (tiny_qwen3_5, {}),
    "qwen3.5 moe": (tiny_qwen3_5_moe, {}),
    # norms after the projections and over the heads of both ranks, windows, two rotary tables
    "olmo 3": (tiny_olmo3, {"sliding_window": 7}),
    "olmo 3, one key": (tiny_olmo3, {"sliding_window": 7, "num_key_value_heads": 1}),
    # exports fuse what its files hold fused; half of a head turns
    "phi 4": (tiny_phi3, {}),
    # norms that multiply by 1 + weight, scaled embeddings, GELU, rotary tables of their own
    "gemma 3": (tiny_gemma3, {"sliding_window": 7}),
    # sinks, windows, a bias in every linear layer, gates that are cut off
    "gpt-oss": (tiny_gpt_oss, {"sliding_window": 7}),
    # norms over the heads of both ranks beside experts, of which a part of a head turns
    "minimax m2": (tiny_minimax_m2, {}),
    # the output projection's bias is added once
    "llama, biased, yarn": (tiny_llama, {"attention_bias": True, "rope_parameters": YARN_ROPE}),
}
CASES = [
    ("qwen2 moe", "tp2"),
    ("glm 4.5", "pp2 vpp2"),
    ("deepseek v3", "tp2 cp2"),
    ("qwen3.5", "cp2"),
    ("qwen3.5 moe", "dp2 ep2"),
    ("olmo 3", "tp2 cp2"),
    ("olmo 3, one key", "tp2"),
    ("phi 4", "tp2 cp2"),
    ("gemma 3", "pp2 vpp2"),
    ("gpt-oss", "tp2 ep2"),
    ("gpt-oss", "pp2 vpp2"),
    ("minimax m2", "tp2 ep2"),
    ("llama, biased, yarn", "tp2"),
]
Made = tuple[Path, list[Batch], list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """By model: its directory, batches, and metrics and directory of one rank's updates."""
    base, found = tmp_path_factory.mktemp("updates"), {}
    for seed, (name, (make, overrides)) in enumerate(MODELS.items()):
        model = make(base / f"model{seed}", seed=seed, **overrides)
        batches = [make_batch(model, samples=4, seed=7 + i, vocab=512, update=i) for i in range(2)]
        out = base / f"out{seed}"
        metrics = run(LAYOUTS["one rank"], "packed", model, batches, out)
        found[name] = (model, batches, metrics, out)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_first_update_equals_float64_autograd(name: str, one_rank: dict[str, Made]):
    model, batches, metrics, out = one_rank[name]
    exact = oracle_update(model, batches[0], lr=ADAM["lr"], eps=ADAM["eps"], clip=ADAM["clip_grad"])
    for key, value in (("loss", exact.loss), ("grad_norm", exact.grad_norm)):
        gap = relative(metrics[0][key], value)
        bounded(f"families against float64 autograd: {key} (relative)", gap, 1e-5, name)
    ours, before = weights(out, 0), load_file(model / "model.safetensors")
    assert ours.keys() == exact.weights.keys() == before.keys()
    gap = relative_gap(exact.weights, ours)
    bounded("families against float64 autograd: updated weights (relative)", gap, 1e-6, name)
    for key, value in exact.weights.items():
        assert wrong_part(before[key], ours[key], value) <= 0.01, key


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_layout_makes_the_same_updates(
    name: str, layout: str, one_rank: dict[str, Made], tmp_path: Path
):
    model, batches, exact, reference = one_rank[name]
    ours = run(LAYOUTS[layout], "packed", model, batches, tmp_path)
    for key, gap in gaps(ours, tmp_path, exact, reference).items():
        bounded(f"families in layouts: {key} (relative)", gap, 1e-5, (name, layout))
