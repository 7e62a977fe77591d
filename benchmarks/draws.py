"""What draws cost a student server: decode speed with m = 0, 1, 16 and 64, interleaved.

One real SGLang server with the shipped student; every round runs each m once, so that a machine
that slows down slows all of them; the ratios to m = 0 are of medians over the rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import RolloutRequest
from sglang_bridge.server.launch import ServerProcess, free_port
from sglang_bridge.server.spec import ServerSpec

MODEL = Path("examples/arithmetic/student")
DRAWS, ROUNDS, BATCH, NEW_TOKENS = (0, 1, 16, 64), 5, 32, 64


async def _round(client: ServerClient, num_draws: int, tag: str) -> tuple[float, float]:
    """(generated tokens per second, distinct ids per token)."""
    requests = [
        RolloutRequest(
            rid=f"{tag}-{i}",
            input_ids=[2 + i % 8] * 8,
            max_new_tokens=NEW_TOKENS,
            num_draws=num_draws,
        )
        for i in range(BATCH)
    ]
    started = time.perf_counter()
    replies = await asyncio.gather(*(client.generate(request) for request in requests))
    seconds = time.perf_counter() - started
    tokens = sum(len(reply.output_ids_T) for reply in replies)
    ids = sum(int((reply.draws.count_N > 0).sum()) for reply in replies if reply.draws)
    return tokens / seconds, ids / tokens


async def _measure(url: str) -> dict[str, Any]:
    speeds: dict[int, list[float]] = {m: [] for m in DRAWS}
    distinct: dict[int, float] = {}
    async with ServerClient(url, timeout_s=120) as client:
        await _round(client, 16, "warm-up")
        for number in range(ROUNDS):
            for m in DRAWS:
                speed, distinct[m] = await _round(client, m, f"{number}-{m}")
                speeds[m].append(speed)
    medians = {m: statistics.median(values) for m, values in speeds.items()}
    return {
        "batch": BATCH,
        "rounds": ROUNDS,
        "decode_tokens_per_s": medians,
        "speed_ratio_to_no_draws": {m: medians[m] / medians[0] for m in DRAWS},
        "distinct_ids_per_token": {m: distinct[m] for m in DRAWS if m},
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
