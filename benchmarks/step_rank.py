"""One learner rank of `python -m benchmarks step`: build, warm up, time updates.

    python -m benchmarks.step_rank CASE.json

CASE.json: {model, learner, shape, warm_up, steps, out}; rank 0 writes its figures to `out`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from harness.synthetic import Shape, sample, share
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.sizing.flops import Work, train_flops
from megatron_opd.sizing.learner import learner_memory, worst_stage
from megatron_opd.transport.messages import UpdateMetrics


def run_case(file: Path) -> None:
    """What this rank does for the case in `file`."""
    case: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    config, shape = LearnerConfig.model_validate(case["learner"]), Shape(**case["shape"])
    updates = case["warm_up"] + case["steps"]
    started = time.perf_counter()
    model = Path(case["model"])
    learner = MegatronLearner(model, config, updates=updates, seed=0)
    built_s = time.perf_counter() - started
    seconds: list[float] = []
    metrics: list[UpdateMetrics] = []
    for update in range(updates):
        samples = [
            sample(shape.samples * update + index, shape, learner.spec.vocab_size, update)
            for index in range(shape.samples)
        ]
        batch = share(samples, config, learner.world.data_rank, update)
        _synchronize(learner)
        if update == case["warm_up"]:
            _forget_peak(learner)
        began = time.perf_counter()
        metrics.append(learner.train(batch, Estimator(), 1.0))
        _synchronize(learner)
        seconds.append(time.perf_counter() - began)
        if learner.world.rank == 0:
            print(f"  update {update}: {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    if learner.world.rank == 0:
        timed = seconds[case["warm_up"] :], metrics[case["warm_up"] :]
        figures = {"build_s": built_s, **_figures(learner, shape, *timed)}
        Path(case["out"]).write_text(json.dumps(figures), encoding="utf-8")
    torch.distributed.destroy_process_group()


def _synchronize(learner: MegatronLearner) -> None:
    """Wait for the device and the other ranks: a clock read before has seen no kernel finish."""
    torch.distributed.barrier()
    if learner.world.device.type == "cuda":
        torch.cuda.synchronize()


def _forget_peak(learner: MegatronLearner) -> None:
    if learner.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _figures(
    learner: MegatronLearner,
    shape: Shape,
    seconds: list[float],
    metrics: list[UpdateMetrics],
) -> dict[str, Any]:
    """What the timed updates say."""
    cuda = learner.world.device.type == "cuda"
    spec, config = learner.spec, learner.config
    work = Work.of([(shape.prompt, shape.response)] * shape.samples)
    flops = train_flops(spec, work)
    step_s = statistics.median(seconds)
    engine = "transformer_engine" if learner.world.kernels.engine else "local"
    planned = worst_stage(learner_memory(spec, config, shape.prompt + shape.response, engine))
    peak = torch.cuda.max_memory_allocated() if cuda else metrics[-1].peak_rss_bytes
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "ranks": learner.world.size,
        "kernels": dict(learner.world.kernels.reasons),
        "step_s": step_s,
        "step_s_of_each": seconds,
        "forward_backward_s": statistics.median(m.forward_backward_s for m in metrics),
        "optimizer_s": statistics.median(m.optimizer_s for m in metrics),
        # what a run's metrics.jsonl says of the same updates
        "metrics": [
            {
                "train_s": m.forward_backward_s + m.optimizer_s,
                "tflops_per_rank": m.tflops_per_rank,
                "mfu": m.mfu,
            }
            for m in metrics
        ],
        "tokens_per_s": work.positions / step_s,
        "response_tokens_per_s": work.scored / step_s,
        "model_flops_per_update": flops,
        "model_gflops_per_token": flops / work.positions / 1e9,
        "model_tflops_per_s_per_rank": flops / step_s / learner.world.size / 1e12,
        "peak_memory_of": "GPU, allocated" if cuda else "resident set",
        "peak_memory_gib": peak / 2**30,
        "planned_memory_gib": planned.total / 2**30,
        "losses": [m.loss for m in metrics],
        "loss_finite": all(math.isfinite(m.loss) for m in metrics),
        "grad_norm_last": metrics[-1].grad_norm,
    }


if __name__ == "__main__":
    run_case(Path(sys.argv[1]))
