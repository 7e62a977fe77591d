"""Recomputed activations are those of the forward pass: the same updates with and without."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_opd.records.types import Batch
from tests.dist import jobs
from tests.dist.caches import make_batch
from tests.dist.layouts import ADAM, weights
from tests.dist.worlds import run_world
from tests.support.models import tiny_qwen3_moe

pytestmark = pytest.mark.dist

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "dense parts alone": {"recompute": "selective", "megatron": {"recompute_modules": ["mlp"]}},
    "full": {"recompute": "full"},
    "one layer of a stage": {
        "recompute": "full",
        "megatron": {"recompute_method": "block", "recompute_num_layers": 1},
    },
}
LEARNT = ("loss", "grad_norm", "reverse_kl_nats", "entropy_nats", "probs_diff_max")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of experts and a dense one; of two experts a token the order could not show."""
    out, experts = tmp_path_factory.mktemp("models") / "mixed", {"num_experts": 8}
    chosen = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts_per_tok": 4}
    return tiny_qwen3_moe(out, seed=6, **experts, **chosen)


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    return make_batch(model, samples=8, seed=5, vocab=512)


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"dp": 2, "ep": 2})]
)
def test_no_way_changes_a_bit(
    ranks: int, parallel: dict[str, int], model: Path, batch: Batch, tmp_path: Path
):
    common = {"optimizer": ADAM, "max_tokens_per_microbatch": 32, "parallel": parallel}
    found: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}
    for way, keys in WAYS.items():
        out = tmp_path / way
        result = run_world(
            jobs.update, ranks, out, model=model, config=common | keys, batches=[batch]
        )
        (metrics,) = result["metrics"]
        found[way] = ({name: metrics[name] for name in LEARNT}, weights(out, 0))
    expected, exact = found.pop("none")
    for way, (figures, tensors) in found.items():
        assert figures == expected, way
        for name, tensor in exact.items():
            assert torch.equal(tensors[name], tensor), (way, name)
