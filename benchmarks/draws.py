"""What a draw cache costs a student server: decode speed with and without, interleaved.

Monte Carlo with 1, 16 and 64 draws a token, and atoms + tail of the same 64 columns. One real
SGLang server with the shipped student; every round runs each support once, so that a machine that
slows down slows all of them; the ratios to no cache are of medians over the rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_bridge.client import ServerClient
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import RolloutRequest
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.spec import ServerSpec

MODEL = Path("examples/arithmetic/student")
ROUNDS, BATCH, NEW_TOKENS = 5, 32, 64
NO_CACHE = "none"
SUPPORTS = {  # name: (atoms, draws) a token
    NO_CACHE: (0, 0),
    "mc_1": (0, 1),
    "mc_16": (0, 16),
    "mc_64": (0, 64),
    "atoms_tail_16_48": (16, 48),
}


async def _round(client: ServerClient, support: str, tag: str) -> tuple[float, float]:
    """(generated tokens per second, distinct selected ids per token)."""
    num_atoms, num_draws = SUPPORTS[support]
    requests = [
        RolloutRequest(
            rid=f"{tag}-{i}",
            input_ids=[2 + i % 8] * 8,
            max_new_tokens=NEW_TOKENS,
            num_atoms=num_atoms,
            num_draws=num_draws,
        )
        for i in range(BATCH)
    ]
    started = time.perf_counter()
    replies = await asyncio.gather(*(client.generate(request) for request in requests))
    seconds = time.perf_counter() - started
    tokens = sum(len(reply.output_ids_T) for reply in replies)
    ids = sum(int((reply.draws.weight_N > 0).sum()) for reply in replies if reply.draws)
    return tokens / seconds, ids / tokens


async def _measure(url: str) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {support: [] for support in SUPPORTS}
    distinct: dict[str, float] = {}
    async with ServerClient(url, timeout_s=120) as client:
        await _round(client, "mc_16", "warm-up")
        for number in range(ROUNDS):
            for support in SUPPORTS:
                tag = f"{number}-{support}"
                speed, distinct[support] = await _round(client, support, tag)
                speeds[support].append(speed)
    medians = {support: statistics.median(values) for support, values in speeds.items()}
    return {
        "batch": BATCH,
        "rounds": ROUNDS,
        "supports": {s: {"num_atoms": k, "num_draws": m} for s, (k, m) in SUPPORTS.items()},
        "decode_tokens_per_s": medians,
        "speed_ratio_to_no_cache": {s: medians[s] / medians[NO_CACHE] for s in SUPPORTS},
        "distinct_ids_per_token": {s: distinct[s] for s in SUPPORTS if s != NO_CACHE},
    }


def measure() -> dict[str, Any]:
    """Start one server and measure."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = ServerSpec(
            model_path=str(MODEL),
            role="student",
            port=free_port(),
            dtype="float32",
            max_total_tokens=16384,
        )
        server = ServerProcess(spec, Path(scratch) / "server.log")
        server.start()
        try:
            server.wait_ready(300)
            return asyncio.run(_measure(spec.url))
        finally:
            server.stop()
