"""The blockwise log-probs over tensor-parallel ranks, and inside Megatron, in float64."""

from pathlib import Path

import pytest

from tests.dist import lean_jobs
from tests.dist.worlds import run_world
from tests.support.figures import bounded
from tests.support.models import tiny_qwen3

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "untied": tiny_qwen3(base / "untied", seed=3),
        "tied": tiny_qwen3(base / "tied", seed=5, tie_word_embeddings=True),
    }


def test_shards_of_the_head_equal_the_whole_one(tmp_path: Path):
    result = run_world(lean_jobs.operation, 2, tmp_path)
    for name, error in result.items():
        bounded(f"lean, tp2, float64: {name}", error, 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_every_gradient_of_a_megatron_model_equals_that_from_dense_logits(
    models: dict[str, Path], tmp_path: Path, kind: str, layout: str
):
    size, parallel = LAYOUTS[layout]
    result = run_world(
        lean_jobs.through_megatron, size, tmp_path, model=models[kind], parallel=parallel
    )
    assert ("output_layer.weight" in result) == (kind == "untied" or layout == "pp2")
    assert "embedding.word_embeddings.weight" in result
    for name, error in result.items():
        bounded("lean in Megatron, float64: loss and gradients", error, 1e-10, name)


def test_gradients_named_by_patterns_are_summed_in_float32(models: dict[str, Path], tmp_path: Path):
    """Megatron's param_name_patterns_for_fp32_local_accumulation, with our own LM head too."""
    errors = run_world(lean_jobs.locally_accumulated, 1, tmp_path, model=models["untied"])
    rounded_once = {
        name for name, error in errors["patterns"].items() if error < 0.75 * errors["lower"][name]
    }
    named = {name for name in errors["lower"] if "linear_qkv.w" in name or "output_layer" in name}
    assert rounded_once == named
