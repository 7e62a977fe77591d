"""Averages and earlier weights of the learner's ranks are the definition's, at every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.dist import follower_jobs
from tests.dist.caches import make_batch
from tests.dist.layouts import LAYOUTS
from tests.dist.shard_jobs import Fleet
from tests.dist.worlds import run_world
from tests.support.models import tiny_qwen3_moe

pytestmark = pytest.mark.dist

SAVED_AFTER, UPDATES = 3, 5  # of the teachers that take over every second version, in between
STEP: dict[str, Any] = {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_tokens_per_microbatch": 64}
TP1, TP2, TP2_EP2 = (1, 1), (2, 1), (2, 2)
CASES = {
    "one rank": ("float32", Fleet("moe", (TP1, TP2), "float32")),
    "tp2": ("float32", Fleet("moe", (TP1,), "float32")),
    "tp2 ep2": ("bfloat16", Fleet("moe", (TP2,), "bfloat16")),
    "tp2 dp2 ep2": ("float32", Fleet("moe", (TP2_EP2,), "float32")),
}


def test_teachers_get_the_defined_weights_and_outlive_an_interruption(tmp_path: Path):
    model = tiny_qwen3_moe(
        tmp_path / "moe", seed=4, num_hidden_layers=2, mlp_only_layers=[1], num_key_value_heads=4
    )
    batches = [make_batch(model, samples=4, seed=u, vocab=512, update=u) for u in range(UPDATES)]
    layouts = {name: each.parallel for name, each in LAYOUTS.items()}
    layouts["tp2 dp2 ep2"] = {"tp": 2, "dp": 2, "ep": 2}
    for name, (dtype, fleet) in CASES.items():
        parallel = layouts[name]
        ranks = LAYOUTS[name].ranks if name in LAYOUTS else 4
        target, config = tmp_path / f"{name} state", STEP | {"parallel": parallel, "dtype": dtype}
        saved = run_world(
            follower_jobs.followed,
            ranks,
            tmp_path / name,
            model=model,
            config=config,
            batches=batches,
            fleet=fleet,
            save_after=SAVED_AFTER,
            target=target,
        )
        if name == "tp2 dp2 ep2":
            config = STEP | {"parallel": {}, "dtype": dtype}
            out = tmp_path / f"{name} on one rank"
            at_one = run_world(
                follower_jobs.loaded, 1, out, model=model, config=config, source=target
            )
            assert at_one == saved, name
