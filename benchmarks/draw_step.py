"""What the draws of one decode step cost on a CPU, by the servers' way and by whole probabilities.

    python -m benchmarks draw_step

CPU time of one thread; the two take turns, so that a slow minute falls on both. moved, reads:
numbers that operations read and write, and read of the logits, over those of the logits
(benchmarks/passes.py). largest: the largest tensor that is made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import dense_draws
from benchmarks.passes import Passes
from sglang_bridge.server.rows import build_rows, forced
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.selection import Wanted, select

# the toy's vocabulary, SmolLM2's, Qwen3's
SIZES = ((32, 512), (32, 49_152), (32, 151_936))
SUPPORTS = {"mc_1": (0, 1), "mc_16": (0, 16), "mc_64": (0, 64), "atoms_16_tail_48": (16, 48)}
REPEATS = 40


def measure() -> dict[str, Any]:
    """Milliseconds of CPU time and passes by size and support."""
    torch.set_num_threads(1)
    return {
        "repeats": REPEATS,
        "threads": 1,
        "entries": [
            _compared(batch, vocab, name, REPEATS) for batch, vocab in SIZES for name in SUPPORTS
        ],
    }


def _compared(batch: int, vocab: int, support: str, repeats: int) -> dict[str, Any]:
    atoms, draws = SUPPORTS[support]
    generator = torch.Generator().manual_seed(vocab)
    logits_BV = 3 * torch.randn(batch, vocab, generator=generator)
    temperature_B1 = torch.ones(batch, 1)
    path_B1 = torch.zeros(batch, 1, dtype=torch.int64)
    uniform_BM = torch.rand(batch, draws, dtype=torch.float64, generator=generator)
    wanted = Wanted(np.full(batch, atoms), np.full(batch, draws))
    probs_BV = logits_BV.softmax(-1)  # the sampler has made them, here as in a server

    def ours() -> None:
        selected = select(behaviour(logits_BV, temperature_B1), wanted, uniform_BM)
        build_rows(selected, forced(path_B1, probs_BV.gather(1, path_B1).log()))

    def dense() -> None:
        dense_draws.recorded(logits_BV, temperature_B1, path_B1, wanted, uniform_BM)

    ways: dict[str, Callable[[], None]] = {"ours": ours, "dense": dense}
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + repeats):
        for name, way in ways.items():
            started = time.thread_time()
            way()
            if turn:  # the first is a warm-up
                times_ms[name].append(1e3 * (time.thread_time() - started))
    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    return {
        "batch": batch,
        "vocab": vocab,
        "support": support,
        "cpu_ms": medians,
        "dense_over_ours": medians["dense"] / medians["ours"],
        "passes": {name: _passes(way, logits_BV) for name, way in ways.items()},
    }


def _passes(way: Callable[[], None], logits_BV: torch.Tensor) -> dict[str, float]:
    with Passes(logits_BV) as counted:
        way()
    return {
        "moved": round(counted.moved, 3),
        "reads": round(counted.reads, 3),
        "largest": round(counted.largest, 3),
        "operations": counted.operations,
    }
