"""Learner speed: one update of the shipped student on synthetic caches, in each two-rank layout.

    python -m benchmarks learner

Every layout trains on the same 32 samples (48 prompt + response tokens, 4 cached ids a token); the
figure is the median over the steps after the first. Ratios are to one rank, in the same call.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.synthetic import Shape, sample, share
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from sglang_bridge.ports import free_port

MODEL = Path("examples/arithmetic/student")
LAYOUTS: dict[str, dict[str, int]] = {
    "1 rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2, "dp": 2},
    "dp2": {"dp": 2},
}
SHAPE = Shape(samples=32, prompt=8, response=40, least_ids=4, most_ids=4)
STEPS = 6


def rank_main() -> None:
    """One rank: train and, on rank 0, print the median step in seconds."""
    from megatron_opd.learner.learner import MegatronLearner

    config = LearnerConfig.model_validate(
        {"parallel": LAYOUTS[sys.argv[1]], "dtype": "float32", "threads": 1}
    )
    learner = MegatronLearner(MODEL, config, updates=STEPS, seed=0)
    samples = [sample(uid, SHAPE, learner.spec.vocab_size) for uid in range(SHAPE.samples)]
    seconds = []
    for step in range(STEPS):
        batch = share(samples, config, learner.world.data_rank, step)
        started = time.perf_counter()
        learner.train(batch, Estimator(), 1.0)
        seconds.append(time.perf_counter() - started)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(statistics.median(seconds[1:])))


def measure() -> dict[str, Any]:
    """Every layout in turn."""
    step_s: dict[str, float] = {}
    for name, layout in LAYOUTS.items():
        ranks = ParallelConfig.model_validate(layout).world_size  # experts split the same ranks
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += [f"--master-port={free_port()}", "-m", "benchmarks.learner", name]
        with tempfile.TemporaryFile("w+") as errors:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            if done.returncode:
                errors.seek(0)
                raise RuntimeError(f"{name}: {errors.read()[-2000:]}")
        step_s[name] = json.loads(done.stdout.strip().splitlines()[-1])
    tokens = SHAPE.samples * SHAPE.response
    return {
        "samples": SHAPE.samples,
        "response_tokens": tokens,
        "update_s": step_s,
        "response_tokens_per_s": {name: tokens / s for name, s in step_s.items()},
        "time_ratio_to_one_rank": {name: s / step_s["1 rank"] for name, s in step_s.items()},
    }


if __name__ == "__main__":
    rank_main()
