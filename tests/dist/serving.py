"""A learner's world behind its socket, for the tests that are its controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.records.types import Batch
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.transport.samples import decode_sample, encode_sample
from tests.dist import jobs
from tests.dist.worlds import World
from tests.support.wire import KEYS

START_S = 60


def make_config(
    model: Path, transport: str | dict[str, object] = "broadcast", **parallel: int
) -> Config:
    """A learner's configuration. transport: its type, or several keys of weight_sync."""
    sync = transport if isinstance(transport, dict) else {"type": transport}
    server = {"model": str(model), "dtype": "float32"}
    learner = {
        "dtype": "float32",
        "threads": 1,
        "timeout_s": 60.0,
        "parallel": parallel,
        "optimizer": {"lr": 1e-3, "eps": 1e-3},
    }
    return Config.model_validate(
        {
            "data": {"train": "unused"},
            "student": server,
            "teacher": server,
            "buffer": {"batch_size": 4},
            "learner": learner,
            "weight_sync": {**sync, "bucket_bytes": 100_000, "timeout_s": 5.0},
        }
    )


async def served(
    config: Config,
    out: Path,
    body: Callable[[RemoteLearner], Awaitable[None]],
    ranks: int,
    admission: Admission | None = None,
    **arguments: Any,
) -> list[int | None]:
    """Run `body` against a served world of `ranks`; exit codes of the ranks.

    arguments: of jobs.serve_controller, besides.
    """
    remote = RemoteLearner(config, admission or Admission(KEYS))
    try:
        with World(
            jobs.serve_controller, ranks, out, config=config, address=remote.address, **arguments
        ) as world:
            await body(remote)
            await remote.stop()
            return await asyncio.to_thread(world.join, 20)
    finally:
        remote.close()


def arrived(batch: Batch) -> Batch:
    """The batch as the ranks read it: log-probs in two bytes."""
    frames = [encode_sample(sample) for sample in batch.samples]
    return replace(batch, samples=tuple(decode_sample(i, own) for i, own in enumerate(frames)))
