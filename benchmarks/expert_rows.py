"""What keeping routed experts costs a server's scheduler thread in a decode step.

    python -m benchmarks expert_rows

Of a model of 48 layers with 8 of 128 experts, in steps of B requests that all ask. by_step: the
servers' way, one copy of slots and one of rows a step. by_request: a copy of each for every
request. They take turns, so that a slow minute falls on both; both keep the same bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang_bridge import wire
from sglang_bridge.server import routing
from sglang_bridge.server.compat import batches
from sglang_bridge.server.routing import ExpertRecord, Experts

BATCHES = (32, 256)
LAYERS, TOPK, EXPERTS = 48, 8, 128
POOL, STEPS, WARM_UP = 16_384, 200, 20
MODEL = Experts(tuple(range(LAYERS)), EXPERTS)


def measure() -> dict[str, Any]:
    """Milliseconds of CPU time a step, by batch and way."""
    torch.set_num_threads(1)
    stored = torch.randint(EXPERTS, (POOL, LAYERS, TOPK), dtype=torch.int32)
    with mock.patch.object(batches, "routed_experts", lambda slots: stored[slots].numpy()):
        entries = [_compared(batch) for batch in BATCHES]
    return {"layers": LAYERS, "topk": TOPK, "steps": STEPS, "entries": entries}


def _compared(size: int) -> dict[str, Any]:
    ways: dict[str, Callable[[Any, list[Any]], None]] = {
        "by_step": by_step,
        "by_request": by_request,
    }
    made = {name: _batch(size) for name in ways}
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(WARM_UP + STEPS):
        out_cache_loc = torch.randint(POOL, (size,))
        commits = [SimpleNamespace(output_index=step)] * size
        for name, way in ways.items():
            made[name].out_cache_loc = out_cache_loc
            started = time.thread_time()
            way(made[name], commits)
            if step >= WARM_UP:
                times_ms[name].append(1e3 * (time.thread_time() - started))
    kept = [
        [bytes(batches.find_record(req, routing.RECORD).rows) for req in made[name].reqs]
        for name in ways
    ]
    if kept[0] != kept[1]:
        raise RuntimeError("the two ways keep different rows")
    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    return {
        "batch": size,
        "cpu_ms_a_step": medians,
        "by_request_over_by_step": medians["by_request"] / medians["by_step"],
    }


def _batch(size: int) -> Any:
    sampling = SimpleNamespace(custom_params={wire.WANTS_EXPERTS: True})
    return SimpleNamespace(
        reqs=[SimpleNamespace(sampling_params=sampling, origin_input_ids=[7]) for _ in range(size)],
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )


def by_step(batch: Any, commits: list[Any]) -> None:
    """As a server does it."""
    slots = routing.slots_of(batch, lambda: MODEL)
    assert slots is not None
    slots.copy_to_host(lambda tensor: tensor).consume(batch, commits)


def by_request(batch: Any, commits: list[Any]) -> None:
    """Slots and rows of every request for themselves."""
    slots = torch.cat([batch.out_cache_loc[i : i + 1].to(torch.int64) for i in range(len(commits))])
    for i, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
        record = batches.record_of(req, routing.RECORD, lambda: ExpertRecord(MODEL, num_prompt=1))
        rows_XLk = batches.routed_experts(slots[i : i + 1])[:, list(MODEL.layers)]
        record.append(commit.output_index, rows_XLk.astype(MODEL.dtype))
