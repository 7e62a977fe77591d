"""Saving and loading a learner's whole state: how long training waits, how long it takes, bytes.

    python -m benchmarks checkpoint

A random Qwen3 of 13 M parameters in bfloat16 (176 MB of weights and float32 optimizer), two
data-parallel ranks, each writing its own half. Seconds are the slowest rank's, medians of REPEATS.
Files are synced to disk when a save is done; a load reads what the page cache holds of them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.synthetic import Shape, sample, share
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from sglang_bridge.ports import free_port

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
RANKS, REPEATS = 2, 5
SHAPE = Shape(samples=16, prompt=16, response=112, least_ids=4, most_ids=4)


def rank_main(base: Path) -> None:
    """One rank: save, train and load in turn; rank 0 prints the figures."""
    from megatron_opd.checkpoint.stated_heads import heads_of
    from megatron_opd.learner.learner import MegatronLearner
    from megatron_opd.learner.state.state import LearnerState

    tree = {"parallel": {"dp": RANKS}, "dtype": "bfloat16", "threads": 1}
    config = LearnerConfig.model_validate(tree)
    learner = MegatronLearner(base / "model", config, updates=100, seed=0, fresh_seed=0)
    parts = learner.model, learner.optimizer, learner.world
    state = LearnerState(*parts, config.dtype, heads_of(learner.spec), 600.0)
    samples = [sample(uid, SHAPE, learner.spec.vocab_size) for uid in range(SHAPE.samples)]
    batch = share(samples, config, learner.world.data_rank, 0)
    path, last = base / "checkpoint", base / "last"

    def train() -> None:
        learner.train(batch, Estimator(), 1.0)

    def save(*, in_background: bool) -> None:
        learner.finish_param_gather()
        state.save(path, 1, in_background=in_background)

    def clear() -> None:
        dist.barrier()
        if learner.world.rank == 0 and path.exists():
            shutil.rmtree(last, ignore_errors=True)
            path.rename(last)
        dist.barrier()

    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], None]) -> None:
        seconds.setdefault(name, []).append(_slowest(action))

    for _ in range(1 + REPEATS):  # the first of each warms up
        timed("update_s", train)
        timed("async_off_training_waits_s", lambda: save(in_background=False))
        clear()
        started = time.perf_counter()
        timed("async_on_training_waits_s", lambda: save(in_background=True))
        state.wait()
        seconds.setdefault("async_on_written_after_s", []).append(time.perf_counter() - started)
        clear()
        save(in_background=True)
        timed("update_while_writing_s", train)
        state.wait()
        timed("load_s", lambda: (state.load(path), None)[1])
        clear()
    if learner.world.rank == 0:
        print(json.dumps(_figures(seconds, last)))
    dist.destroy_process_group()


def _slowest(action: Callable[[], None]) -> float:
    """Seconds of the rank that takes longest; all start together."""
    dist.barrier()
    started = time.perf_counter()
    action()
    took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _figures(seconds: dict[str, list[float]], path: Path) -> dict[str, Any]:
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    of_ranks = [
        sum(size for name, size in sizes.items() if name.startswith(f"__{rank}_"))
        for rank in range(RANKS)
    ]
    medians = {name: round(statistics.median(took[1:]), 3) for name, took in seconds.items()}
    whole = sum(sizes.values())
    return {
        "ranks": {"dp": RANKS},
        "bytes": whole,
        "shard_bytes_of_each_rank": of_ranks,
        **medians,
        "save_mb_per_s": round(whole / 1e6 / medians["async_off_training_waits_s"], 1),
        "load_mb_per_s": round(whole / 1e6 / medians["load_s"], 1),
        "seconds_of_each": {
            name: [round(s, 3) for s in took[1:]] for name, took in seconds.items()
        },
    }


def measure() -> dict[str, Any]:
    """The figures."""
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        (base / "model").mkdir()
        (base / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
        command += [f"--master-port={free_port()}", "-m", "benchmarks.checkpoint", scratch]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
