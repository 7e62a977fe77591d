"""Syncs learner weights to the student's servers without discarding any request in flight.

    pause(retract) -> begin -> every bucket (POST to all servers while the learner broadcasts)
      -> flush cache -> end(version) -> [first time: compare digests] -> continue

A retracted request keeps the tokens it has; its KV is rebuilt under the new weights. If any step
fails or is silent for longer than the limit, the sync fails and the servers are not resumed:
they may hold a mixture of versions. The learner's broadcast cannot end when a server refuses its
bucket, so the first failure on either side ends the step.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, Protocol

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.metrics.types import Phase, WeightSyncReport
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.fleet import WeightsWorld
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import BucketSpec, WeightPiece

# a server with tied embeddings has no output head of its own to compare
TIED_HEAD = "lm_head.weight"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class SyncedFleet(Protocol):
    """Names the methods of sglang_bridge.fleet.Fleet that a weight sync needs."""

    @property
    def world(self) -> WeightsWorld:
        """Returns the ranks of the update group."""
        ...

    async def versions(self) -> Mapping[str, int]:
        """Return the version that each server holds, by server."""
        ...

    async def pause(self, mode: Literal["retract"] = "retract") -> None:
        """Stop sampling on all servers."""
        ...

    async def resume(self) -> None:
        """Continue sampling on all servers."""
        ...

    async def flush_cache(self) -> None:
        """Discard cached prefixes, which old weights computed."""
        ...

    async def begin_weight_update(self) -> None:
        """Open the update on all servers."""
        ...

    async def end_weight_update(self, version: int) -> None:
        """Close the update and label later tokens with its version."""
        ...

    async def init_weights_group(
        self, host: str, port: int, name: str, backend: str, timeout_s: float | None = None
    ) -> None:
        """Let every rank of every server join the learner's group."""
        ...

    async def destroy_weights_group(self, name: str) -> None:
        """Let every server leave the group."""
        ...

    async def update_bucket(
        self, bucket: BucketSpec, group_name: str, timeout_s: float | None = None
    ) -> None:
        """Let every server receive one bucket."""
        ...

    async def weight_digests(self) -> Mapping[str, Sequence[WeightPiece]]:
        """Return what every rank of every server holds, by server."""
        ...


class SendingLearner(Protocol):
    """Names the methods of transport.zmq.RemoteLearner that a weight sync needs."""

    async def manifest(self) -> Sequence[BucketSpec]:
        """Return the buckets in the order in which send_weights sends them."""
        ...

    async def connect_weights(self, host: str, port: int, world_size: int, group_name: str) -> None:
        """Listen at host:port as rank 0 and return when the group is complete."""
        ...

    async def send_weights(self) -> object:
        """Broadcast every bucket to the servers."""
        ...

    async def piece_digests(self, pieces: Sequence[WeightPiece]) -> Sequence[str]:
        """Return digests of the same slices of the learner's export, in order."""
        ...


class WeightSync:
    """Performs all weight syncs of one run; implements controller.ports.WeightSyncer.

    Args:
        fleet: the student servers.
        learner: where the weights are.
        config: host of the learner's rank 0, limits, verification.
        backend: torch.distributed's, for the update group.
    """

    def __init__(
        self,
        fleet: SyncedFleet,
        learner: SendingLearner,
        config: WeightSyncConfig,
        backend: str = "gloo",
    ) -> None:
        self._fleet, self._learner, self._config, self._backend = fleet, learner, config, backend
        # a server refuses a name it has seen, also one of an earlier run
        self._group = f"opd-{uuid.uuid4().hex[:12]}"
        self._buckets: tuple[BucketSpec, ...] = ()
        self._num_bytes = 0
        self._phases: list[Phase] = []
        self._verified = not config.verify_first
        self._failed: str | None = None

    async def open(self) -> None:
        """Form the update group of the learner's rank 0 and every rank of every server.

        Raises WeightSyncFailed when a server holds weights of another run or does not join in
        time.
        """
        for url, version in (await self._within("versions", self._fleet.versions())).items():
            if version != 0:
                raise WeightSyncFailed(
                    f"{url} already holds version {version} of another run: restart it"
                )
        self._buckets = tuple(await self._within("manifest", self._learner.manifest()))
        self._num_bytes = sum(map(bucket_bytes, self._buckets))
        host, port = self._config.host, free_port(self._config.host)
        world = self._fleet.world.size
        timeout_s = self._config.timeout_s
        await self._within(
            "group",
            both(
                self._learner.connect_weights(host, port, world, self._group),
                self._fleet.init_weights_group(host, port, self._group, self._backend, timeout_s),
            ),
        )

    async def sync(self, version: int) -> WeightSyncReport:
        """Make `version` live on every server.

        Raises WeightSyncFailed; the servers stay paused then, and every later call fails too.
        """
        if not self._buckets:
            raise WeightSyncFailed("weights were sent before the update group was opened")
        if self._failed is not None:
            raise WeightSyncFailed(f"an earlier weight sync failed: {self._failed}")
        try:
            return await self._sync(version)
        except WeightSyncFailed as error:
            self._failed = str(error)
            raise

    async def close(self) -> None:
        """Make the servers leave the group, for servers that outlive the run."""
        await self._within("leave", self._fleet.destroy_weights_group(self._group))

    async def _sync(self, version: int) -> WeightSyncReport:
        self._phases = []
        await self._phase("pause", self._fleet.pause("retract"))
        await self._phase("begin", self._fleet.begin_weight_update())
        await self._phase("send", both(self._learner.send_weights(), self._receive()))
        await self._phase("flush", self._fleet.flush_cache())
        await self._phase("end", self._fleet.end_weight_update(version))
        if not self._verified:
            await self._phase("verify", self._verify())
            self._verified = True
        await self._phase("continue", self._fleet.resume())
        resumed_s = self._phases[-1].finished_s
        await self._phase("versions", self._check_versions(version))
        paused_from_s = self._phases[0].started_s
        phases = tuple(self._phases)
        return WeightSyncReport(version, phases, self._num_bytes, paused_from_s, resumed_s)

    async def _receive(self) -> None:
        for bucket in self._buckets:
            await self._fleet.update_bucket(bucket, self._group, self._config.timeout_s)

    async def _check_versions(self, version: int) -> None:
        for url, held in (await self._fleet.versions()).items():
            if held != version:
                raise WeightSyncFailed(
                    f"{url} reports version {held} after version {version} was sent"
                )

    async def _verify(self) -> None:
        """Compare what every server rank holds with the learner's export."""
        names = {name for bucket in self._buckets for name in bucket.names} - {TIED_HEAD}
        by_server = await self._fleet.weight_digests()
        wanted = {_slice(piece): piece for pieces in by_server.values() for piece in pieces}
        digests = await self._learner.piece_digests(list(wanted.values()))
        expected = dict(zip(wanted, digests, strict=True))
        for url, pieces in by_server.items():
            missing = names - {piece.hf_name for piece in pieces}
            if missing:
                raise WeightSyncFailed(f"{url} reports no digest of {min(missing)}")
            for piece in pieces:
                if piece.digest != expected[_slice(piece)]:
                    raise WeightSyncFailed(
                        f"{url} rank {piece.rank}: {piece.hf_name} "
                        f"[{piece.start}:{piece.start + piece.length}] of dimension {piece.dim} "
                        "differs from the learner's after the first weight sync"
                    )

    async def _phase(self, name: str, step: Awaitable[object]) -> None:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        await self._within(name, step)
        self._phases.append(Phase(name, started_s, clock()))

    async def _within(self, name: str, step: Awaitable[Any]) -> Any:
        """Return `step`'s result; a failure or timeout becomes WeightSyncFailed with its name."""
        limit = asyncio.timeout(self._config.timeout_s)
        try:
            async with limit:
                return await step
        except Exception as error:
            silent = isinstance(error, TimeoutError) and limit.expired()
            allowed = f"weight_sync.timeout_s = {self._config.timeout_s:g}"
            cause = f"not done within {allowed}" if silent else str(error) or type(error).__name__
            raise WeightSyncFailed(f"{name}: {cause}") from error


async def both(learner: Awaitable[object], fleet: Awaitable[object]) -> None:
    """Run the two sides of one exchange; the first failure cancels the other side and is raised.

    When both have failed by then, the fleet's is raised: a server that refuses is the cause of a
    learner that keeps waiting.
    """
    tasks = [asyncio.ensure_future(fleet), asyncio.ensure_future(learner)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bucket_bytes(bucket: BucketSpec) -> int:
    """Return the bytes of one flattened bucket.

    Raises ValueError for a dtype that is never sent.
    """
    total = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        if dtype.removeprefix("torch.") not in ITEM_BYTES:
            raise ValueError(f"{name}: dtype {dtype} is not one of {sorted(ITEM_BYTES)}")
        total += math.prod(shape) * ITEM_BYTES[dtype.removeprefix("torch.")]
    return total


def _slice(piece: WeightPiece) -> tuple[str, int, int, int, str]:
    return piece.hf_name, piece.dim, piece.start, piece.length, piece.dtype
