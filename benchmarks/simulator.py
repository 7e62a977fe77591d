"""What the controller costs: a million samples, thousands of simulated servers, on one core.

    python -m benchmarks simulator [--samples N] [--sizes few|many]

Two runs of `simulate` on a virtual clock, whose parts have the costs of a 7B model on GPUs, with
the same number of samples:

  few    16 student servers, batches of 1,024 samples, two batches in flight
  many   4,096 student servers, batches of 16,384, 32,768 requests in flight

Times are of this process's CPU. The control, "null", is the same run with servers that answer at
once, a tenth as long: what is left of it is the controller with its loops, buffer, permits, fleets
and recorder, and the event loop. The difference are the models of the servers and their events.

What it cannot say: what HTTP and the parsing of replies cost, which real servers need besides.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    LognormalLengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.servers import SimulatedServer
from megatron_opd.sim.world import simulate

Tree = dict[str, Any]
COSTS = Costs(
    engine=EngineCost(
        step_s=0.008,
        step_request_s=3e-5,
        step_cached_token_s=2e-8,
        prefill_token_s=3e-5,
        request_s=1e-3,
        max_running=64,
        cache_tokens=400_000,
    ),
    teachers={"teacher": ScoreCost(request_s=1e-3, token_s=3e-5)},
    learner=LearnerCost(update_s=0.5, token_s=1e-6, token_context_s=1e-11, ranks=16),
    sync=SyncCost(sync_s=2.0, paused_s=0.5),
)
LENGTHS = LognormalLengths(mean=800.0, cv=1.0, prompt_tokens=256)
SIZES: dict[str, Tree] = {
    "few": {"servers": 16, "batch": 1024, "teachers": 4},
    "many": {"servers": 4096, "batch": 16384, "teachers": 512},
}
SAMPLES = 1_000_000


def measure(options: Sequence[str] = ()) -> Tree:
    """Run each size in a process of its own, so that its peak memory is its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulator")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    arguments = parser.parse_args(list(options))
    context = get_context("spawn")
    found: Tree = {}
    for name in arguments.sizes:
        for kind, run in KINDS.items():
            # what is left out of the control costs the same for each sample
            samples = arguments.samples if kind == "whole" else arguments.samples // 10
            with context.Pool(1) as pool:
                found[f"{name} {kind}"] = pool.apply(run, (name, samples))
    return {"runs": found, **split(found, arguments.sizes)}


def split(found: Tree, sizes: Sequence[str]) -> Tree:
    """Return where the CPU time of a sample goes, in microseconds."""
    shares: Tree = {}
    for name in sizes:
        whole, null = (found[f"{name} {kind}"]["cpu_us_per_sample"] for kind in ("whole", "null"))
        shares[name] = {
            "controller": round(null, 1),
            "models": round(whole - null, 1),
        }
    return {"cpu_us_per_sample": shares}


def config_of(name: str, samples: int) -> Config:
    """Return the configuration of a run of at least so many samples."""
    size = SIZES[name]
    batch = size["batch"]
    return Config.model_validate(
        {
            "run": {"max_steps": max(2, -(-samples // batch))},
            "data": {"train": "unused"},
            "student": {"model": "unused", "servers": size["servers"]},
            "teacher": {"model": "unused", "servers": size["teachers"]},
            "buffer": {"batch_size": batch},
            "rollout": {"max_new_tokens": 8192, "concurrency": 2 * batch},
            "scoring": {"concurrency": size["teachers"] * 8},
            "weight_sync": {"timeout_s": 3600.0},
        }
    )


def whole(name: str, samples: int) -> Tree:
    """Measure a simulated run."""
    return _measured(config_of(name, samples))


def null(name: str, samples: int) -> Tree:
    """Measure the same with servers that answer at once, in no time on any clock."""

    async def at_once(self: SimulatedServer[Any], job: Any) -> None:
        self.must_be_up()
        if hasattr(job, "spans"):
            job.spans.append((self.version, 0))

    SimulatedServer.work_on = at_once
    return _measured(config_of(name, samples))


KINDS: dict[str, Callable[[str, int], Tree]] = {"whole": whole, "null": null}


def _measured(config: Config) -> Tree:
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    outcome = simulate(config, COSTS, LENGTHS)
    cpu_s = time.process_time() - began_cpu_s
    return {
        "samples": outcome.samples,
        "updates": outcome.updates,
        "servers": config.student.servers,
        "in_flight": 2 * config.buffer.batch_size,
        "virtual_s": round(outcome.wall_s, 1),
        "wall_s": round(time.monotonic() - began_s, 1),
        "cpu_s": round(cpu_s, 1),
        "cpu_us_per_sample": round(1e6 * cpu_s / outcome.samples, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "mib_before": round(before_mb),
        "staleness_mean": outcome.staleness_mean,
        "busy": {stage: round(share, 3) for stage, share in outcome.busy.items()},
    }
