"""Where NVIDIA apex is found the learner's own path calls it, and trains the same model."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist import jobs
from tests.dist.caches import make_batch
from tests.dist.layouts import ADAM, weights
from tests.dist.worlds import TIMEOUT_S, run_world
from tests.support.models import dense_and_moe
from tests.support.paths import ROOT

pytestmark = pytest.mark.dist

CONFIG = {
    "optimizer": ADAM | {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9},
    "num_mini_batches": 2,
    "max_tokens_per_microbatch": 32,
}


def test_apex_computes_the_steps_and_the_weight_gradients(tmp_path: Path):
    model = dense_and_moe(tmp_path / "models")["dense"]
    batches = [
        make_batch(model, samples=8, seed=s, vocab=512, update=u) for u, s in enumerate((5, 6))
    ]
    arguments = {"model": model, "config": CONFIG, "batches": batches}
    without, out = tmp_path / "without", tmp_path / "apex"
    expected = run_world(jobs.update, 1, without, **arguments)["metrics"]
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.apex_jobs", str(out)],
        input=pickle.dumps(arguments),
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    told = json.loads((out / "apex.json").read_text())
    assert told["reasons"]["optimizer here"].startswith("apex's FusedAdam")
    assert told["reasons"]["weight gradients here"].startswith("fused (apex's")
    assert len(told["built"]) == 1
    given = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.1}
    assert told["built"][0] == given
    # two updates of two mini-batches
    assert told["calls"]["FusedAdam.step"] == told["steps"] == 4
    assert told["calls"]["multi_tensor_scale"] >= 4
    # four linear layers in each of two blocks, and the head, whose gradient the lean operation adds
    assert told["fused_layers"] == 9
    calls, rest = divmod(told["calls"]["wgrad_gemm_accum_fp32"], 8)
    assert calls >= 4
    assert rest == 0
    metrics = json.loads((out / "result.json").read_text())["metrics"]
    for name in ("loss", "grad_norm"):
        ours, theirs = ([row[name] for row in rows] for rows in (metrics, expected))
        assert ours == pytest.approx(theirs, rel=1e-5), name
    for update in range(len(batches)):
        mine, other = weights(out, update), weights(without, update)
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert (tensor - other[name]).abs().max() < 1e-6, name
