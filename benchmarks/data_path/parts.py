"""A run's parts around fake servers: all real, but a learner that stops before its socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from benchmarks.data_path.cases import DRAWS, Case, prompt_ids
from benchmarks.data_path.servers import serving
from megatron_opd.batching.shares import shares
from megatron_opd.config.schema import Config
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.types import Batch, LearnerTurn, Prompt, Sample
from megatron_opd.transport.frames import to_frames
from megatron_opd.transport.messages import UpdateMetrics
from megatron_opd.transport.samples import EncodedSample

FIGURES = UpdateMetrics(0, 1.0, 1.0, 0.0, 1, 1, 1, None, None, 0, 1.0, 1.0, 1.0, 0.0, 0.0, 0)


def configuration(
    case: Case, updates: int, batch_size: int, slots: int = 4, sync_every: int | None = None
) -> Config:
    """Return the configuration of a run of 64 draws a token. slots: requests at a time.

    sync_every: None: one weight sync, at the end, for servers that say version 0 to the last.
    """
    routing = {"routing_replay": "rollout"} if case.routed else {}
    return Config.model_validate(
        {
            "run": {"max_steps": updates},
            "data": {"train": "x"},
            "student": {"model": "m"},
            "teacher": {"model": "m"},
            "objective": {"type": "reverse_kl"},
            "support": {"type": "mc", "m": DRAWS},
            "rollout": {"max_new_tokens": case.tokens, "concurrency": slots},
            "scoring": {"concurrency": slots},
            "schedule": {"type": "async", "max_staleness": 1, "sync_every": sync_every or updates},
            "buffer": {"batch_size": batch_size},
            "learner": {"max_tokens_per_microbatch": 1 << 20, **routing},
        }
    )


def prompts(case: Case) -> Iterator[Prompt]:
    """Yield prompts without end."""
    ids_P, uid = prompt_ids(case), 0
    while True:
        yield Prompt(uid, "", ids_P)
        uid += 1


def fake_servers(case: Case) -> AbstractContextManager[list[str]]:
    """Run the student and the teacher in a process of their own; yield their addresses."""
    words = [str(case.tokens), str(case.ids), str(int(case.routed))]
    return serving("benchmarks.data_path.servers", *words)


@dataclass
class FramingLearner:
    """Does what the controller's side of an update does, up to the socket."""

    config: Config
    wire_bytes: int = 0
    samples: int = 0

    def prepare(self, sample: Sample) -> Sample:
        """Encode a scored sample."""
        return EncodedSample.of(sample, DRAWS)

    async def train(self, batch: Batch) -> UpdateMetrics:
        """Make the frames of an update and forget them."""
        for share in shares(batch, self.config.learner, self.config.estimator, 1):
            self.wire_bytes += sum(len(frame) for frame in to_frames(share))
        self.samples += len(batch.samples)
        return FIGURES


class NoWeights:
    """Syncs nothing, at once."""

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        """Say that the version is live."""
        now_s = asyncio.get_running_loop().time()
        return WeightSyncReport(version, (), 0, now_s, now_s)

    async def make_room(self) -> None:
        """Share nothing."""

    async def until_none_serves(self) -> None:
        """Lose no server."""
        await asyncio.Event().wait()

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Add no server."""


class Silent:
    """Records nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def nothing(*args: object, **kwargs: object) -> None:
            return

        setattr(self, name, nothing)  # what it costs to be found is not the controller's
        return nothing


def silent() -> Any:
    """Return an observer that records nothing."""
    return Silent()
