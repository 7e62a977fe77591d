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

import numpy as np

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.data.packing import plan_batch
from megatron_opd.types import Draws, Prompt, Rollout, Sample, VersionSpan
from sglang_bridge.ports import free_port

MODEL = Path("examples/arithmetic/student")
LAYOUTS: dict[str, dict[str, int]] = {
    "1 rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2, "dp": 2},
    "dp2": {"dp": 2},
}
SAMPLES, PROMPT, RESPONSE, IDS, STEPS = 32, 8, 40, 4, 6


def sample(uid: int, vocab: int) -> Sample:
    """A sample with uniform random tokens and plausible log-probs."""
    random = np.random.default_rng(uid)
    ids_TK = np.stack([random.permutation(vocab)[:IDS] for _ in range(RESPONSE)])
    ids_TK = np.sort(ids_TK, axis=1).astype(np.int32)
    logp_N = random.uniform(-4, -1, RESPONSE * IDS).astype(np.float32)
    starts_T = np.arange(RESPONSE, dtype=np.int64) * IDS
    draws = Draws(
        offsets_T1=np.append(starts_T, RESPONSE * IDS),
        ids_N=ids_TK.ravel(),
        weight_N=np.full(RESPONSE * IDS, 1 / IDS, dtype=np.float32),
        sampler_logp_N=logp_N,
        path_T=starts_T,
    )
    prompt = Prompt(uid, "", random.integers(0, vocab, PROMPT).astype(np.int32))
    spans = (VersionSpan(0, 0, RESPONSE),)
    rollout = Rollout(prompt, ids_TK[:, 0].copy(), draws, spans, "length", 0.0, 0.0)
    return Sample(rollout, logp_N + 0.1)


def rank_main() -> None:
    """One rank: train and, on rank 0, print the median step in seconds."""
    from megatron_opd.learner.learner import MegatronLearner
    from megatron_opd.transport.rank_batch import rank_batch

    config = LearnerConfig.model_validate(
        {"parallel": LAYOUTS[sys.argv[1]], "dtype": "float32", "threads": 1}
    )
    learner = MegatronLearner(MODEL, config, updates=STEPS, seed=0)
    ranks = config.parallel.dp
    samples = [sample(uid, learner.spec.vocab_size) for uid in range(SAMPLES)]
    lengths = [each.rollout.num_tokens for each in samples]
    plan = plan_batch(lengths, 1, ranks, config.tokens_per_microbatch)
    mine = [micro[learner.world.data_rank] for micro in plan]
    held = sorted(i for mini in mine for micro in mini for i in micro)
    local = [[[held.index(i) for i in micro] for micro in mini] for mini in mine]
    seconds = []
    for step in range(STEPS):
        batch = rank_batch(step, 0, [samples[i] for i in held], local)
        started = time.perf_counter()
        learner.train(batch, Estimator(), 1.0)
        seconds.append(time.perf_counter() - started)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(statistics.median(seconds[1:])))


def measure() -> dict[str, Any]:
    """Every layout in turn."""
    step_s: dict[str, float] = {}
    for name, layout in LAYOUTS.items():
        ranks = int(np.prod(list(layout.values()) or [1]))
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
    tokens = SAMPLES * RESPONSE
    return {
        "samples": SAMPLES,
        "response_tokens": tokens,
        "update_s": step_s,
        "response_tokens_per_s": {name: tokens / s for name, s in step_s.items()},
        "time_ratio_to_one_rank": {name: s / step_s["1 rank"] for name, s in step_s.items()},
    }


if __name__ == "__main__":
    rank_main()
