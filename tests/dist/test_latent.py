"""One update of latent attention: against float64, and every layout against one rank."""

from pathlib import Path

import pytest

from tests.dist.caches import make_batch, oracle_update
from tests.dist.layouts import ADAM, LAYOUTS, gaps, relative_gap, run, weights
from tests.support.figures import bounded, relative
from tests.support.latent_models import tiny_deepseek_v2, tiny_deepseek_v3

pytestmark = pytest.mark.dist

DENSE = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
MAKERS = {"from a latent": tiny_deepseek_v3, "from the input": tiny_deepseek_v2}
SHARED = ("tp2 cp2",)
OTHERS = {"from a latent": SHARED, "from the input": ()}


@pytest.mark.parametrize("queries", MAKERS)
def test_an_update_is_that_of_float64_at_every_layout(queries: str, tmp_path: Path):
    model = MAKERS[queries](tmp_path / "model", seed=3, **DENSE)
    batch = make_batch(model, samples=8, seed=7, vocab=512)
    ours, one = (
        run(LAYOUTS["one rank"], "packed", model, [batch], tmp_path / "one"),
        tmp_path / "one",
    )
    exact = oracle_update(model, batch, lr=ADAM["lr"], eps=ADAM["eps"], clip=ADAM["clip_grad"])
    expected = {"loss": exact.loss, "grad_norm": exact.grad_norm}
    for key, value in expected.items():
        gap = relative(ours[0][key], value)
        bounded(f"latent attention against float64: {key} (relative)", gap, 3e-5, queries)
    gap = relative_gap(exact.weights, weights(one, 0))
    bounded("latent attention against float64: weights (relative)", gap, 1e-6, queries)
    for name in OTHERS[queries]:
        out = tmp_path / name
        found = run(LAYOUTS[name], "packed", model, [batch], out)
        for key, gap in gaps(found, out, ours, one).items():
            bounded(f"latent attention against one rank: {key} (relative)", gap, 1e-5, name)
