"""Bytes that each rank of a model copy receives of a share: all frames, and what its stage reads.

    python -m benchmarks handing_out

A share of 8 samples of 4,096 tokens (64 draws of 14 distinct ids a token, benchmarks/data_path/),
with and without the routed experts of 48 layers of 8, goes from the head to the ranks of its copy
by the learner's own code, over gloo on one machine. received_bytes: payload by rank; the head has
its own from the controller. whole: every rank is sent all frames. parts: what its stage reads.
cut_cpu_s: CPU time in which the head cuts the share. seconds: from a barrier until the last rank
has its part, a median; all ranks share the machine's cores, so it says little about a network.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.data_path.cases import DRAWS, LAYERS, Case, make_rows, prompt_ids
from megatron_opd.batching.advantages import no_groups
from megatron_opd.batching.shares import SampleSequence, Share
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.share_broadcast import broadcast, deal
from megatron_opd.learner.world import World, init_world
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Prompt, Sample, VersionSpan
from megatron_opd.transport.frames import to_frames
from megatron_opd.transport.parts import Needs, part_of
from megatron_opd.transport.samples import Buffer, EncodedSample
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import DrawCache

LAYOUTS: dict[str, dict[str, int]] = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "tp2 pp2": {"tp": 2, "pp": 2},
}
CASES = (Case(4096, 14), Case(4096, 14, routed=True))
SAMPLES, ROUNDS = 8, 5
TIMEOUT_S = 300.0

Parts = list[list[Buffer]]


def share_frames(case: Case) -> list[Buffer]:
    """Return the frames of a share of equal samples."""
    rows = make_rows(case)
    columns, tokens = dict(rows.columns), len(rows.output_ids_T)
    offsets_T1 = np.concatenate([[0], np.cumsum(columns.pop("length_T"), dtype=np.int64)])
    path_T = offsets_T1[:-1] + columns.pop("path_T")
    rollout = single_turn(
        Prompt(0, "", prompt_ids(case)),
        rows.output_ids_T,
        DrawCache(offsets_T1=offsets_T1, path_T=path_T, **columns),
        (VersionSpan(0, 0, tokens),),
    )
    rollout = replace(rollout, experts_XLk=rows.experts_XLk)
    sample = EncodedSample.of(Sample(rollout, rows.teacher_logp_N), DRAWS)
    plan = [[list(range(SAMPLES))]]
    share = Share(0, 0, plan, (SampleSequence(sample),) * SAMPLES, no_groups(SAMPLES))
    return to_frames(share)


def stages(world: World, *, routed: bool) -> list[Needs]:
    """Return what each stage reads, with the layers shared out equally."""
    count = world.parallel.pp
    layers = [tuple(part.tolist()) for part in np.array_split(np.arange(LAYERS), count)]
    return [
        Needs(
            cache=stage == count - 1,
            layers=layers[stage] if routed else (),
            of_layers=LAYERS if routed else 0,
        )
        for stage in range(count)
    ]


def rank_main(name: str) -> None:
    """Be one rank of a layout; rank 0 prints its entries."""
    with cpu.install():
        world = init_world(ParallelConfig.model_validate(LAYOUTS[name]), 0, 1, TIMEOUT_S)
    entries = [entry(name, case, world) for case in CASES]
    if world.rank == 0:
        sys.stdout.write(f"{json.dumps(entries)}\n")
    dist.destroy_process_group()


def entry(name: str, case: Case, world: World) -> dict[str, Any]:
    """Measure one case on every rank."""
    frames = share_frames(case) if world.is_head else []
    parts: Parts = []
    cut_s = 0.0
    if world.is_head:
        began_s = time.process_time()
        parts = [part_of(frames, needs) for needs in stages(world, routed=case.routed)]
        cut_s = time.process_time() - began_s
    ways: dict[str, Callable[[], list[Buffer]]] = {
        "whole": lambda: broadcast(frames, world, world.model_group),
        "parts": lambda: deal(parts, world),
    }
    found = {way: handed_out(hand_out, world) for way, hand_out in ways.items()}
    received = {way: each["received_bytes"] for way, each in found.items()}
    return {
        "case": f"{name}, {case.name}",
        "share_bytes": sum(len(frame) for frame in frames),
        "cut_cpu_s": round(cut_s, 4),
        **found,
        "bytes_ratio": round(sum(received["parts"]) / sum(received["whole"]), 3),
    }


def handed_out(hand_out: Callable[[], list[Buffer]], world: World) -> dict[str, Any]:
    """Return what every rank received, and how long it took."""
    seconds: list[float] = []
    mine: list[Buffer] = []
    for _ in range(ROUNDS):
        dist.barrier()
        began_s = time.perf_counter()
        mine = hand_out()
        dist.barrier()
        seconds.append(time.perf_counter() - began_s)
    received = 0 if world.is_head else sum(len(frame) for frame in mine)
    by_rank: list[Any] = [None] * world.size
    dist.all_gather_object(by_rank, received)
    return {"received_bytes": by_rank, "seconds": round(statistics.median(seconds), 4)}


def measure() -> dict[str, Any]:
    """Return the entries of every layout."""
    return {
        "samples": SAMPLES,
        "rounds": ROUNDS,
        "entries": [row for name in LAYOUTS for row in world_of(name)],
    }


def world_of(name: str) -> list[dict[str, Any]]:
    """Run the ranks of a layout; return what rank 0 printed."""
    ranks = int(np.prod(list(LAYOUTS[name].values())))
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.handing_out", name],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{name}: exit codes {[p.returncode for p in processes]}")
    return json.loads(printed[0].splitlines()[-1])


if __name__ == "__main__":
    rank_main(sys.argv[1])
