"""An update of what only some families have, cut over ranks, against float64 autograd."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.caches import make_batch, oracle_update
from tests.dist.layouts import ADAM, LAYOUTS, relative_gap, run, weights
from tests.support.figures import bounded, relative
from tests.support.models import YARN_ROPE, tiny_llama, tiny_olmo3

pytestmark = pytest.mark.dist

CASES: dict[str, tuple[Callable[..., Path], dict[str, Any], str]] = {
    # norms after the projections and over the heads of both ranks, windows, two rotary tables
    "olmo 3": (tiny_olmo3, {"sliding_window": 7}, "tp2 cp2"),
    "olmo 3, one key": (tiny_olmo3, {"sliding_window": 7, "num_key_value_heads": 1}, "tp2"),
    # the output projection's bias is added once
    "llama, biased, yarn": (
        tiny_llama,
        {"attention_bias": True, "rope_parameters": YARN_ROPE},
        "tp2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_update_equals_float64_autograd(name: str, tmp_path: Path):
    make, overrides, layout = CASES[name]
    model = make(tmp_path / "model", seed=3, **overrides)
    batch = make_batch(model, samples=4, seed=7, vocab=512)
    exact = oracle_update(model, batch, lr=ADAM["lr"], eps=ADAM["eps"], clip=ADAM["clip_grad"])
    (metrics,) = run(LAYOUTS[layout], "packed", model, [batch], tmp_path / "run")
    expected = {"loss": exact.loss, "grad_norm": exact.grad_norm}
    for key, value in expected.items():
        gap = relative(metrics[key], value)
        bounded(f"families against float64 autograd: {key} (relative)", gap, 1e-5, name)
    gap = relative_gap(exact.weights, weights(tmp_path / "run", 0))
    bounded("families against float64 autograd: updated weights (relative)", gap, 1e-6, name)
