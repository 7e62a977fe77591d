"""Sends full tensors in flattened buckets, broadcast by the learner's rank 0 to every server rank.

The wire format is SGLang's: /update_weights_from_distributed with load_format "flattened_bucket",
the raw bytes of a bucket's tensors end to end. The learner's broadcast cannot end when a server
refuses its bucket, so the first failure on either side ends the step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_opd.config.schema import Config
from megatron_opd.weight_sync.broadcast_messages import (
    JoinGroup,
    LeaveGroup,
    ListBuckets,
    ListenForBroadcast,
    SendBuckets,
    decode_address,
    decode_buckets,
    decode_failure,
    encode_request,
)
from megatron_opd.weight_sync.transport import (
    AskLearner,
    LearnerPart,
    ReceivingFleet,
    TransportKind,
    both,
    new_group_name,
)
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.protocol import BucketSpec
from sglang_bridge.weights.formats import PLAIN_BYTES

if TYPE_CHECKING:
    from megatron_opd.models.gather import FullTensors


class Broadcast:
    """Broadcasts through one group of all server ranks; implements transport.FleetPart."""

    def __init__(
        self,
        fleet: ReceivingFleet,
        ask: AskLearner,
        config: Config,
        backend: str = "gloo",
    ) -> None:
        self._fleet, self._ask, self._backend = fleet, ask, backend
        self._config = config.weight_sync
        self._group = new_group_name()
        self._buckets: tuple[BucketSpec, ...] = ()

    @property
    def tensors(self) -> frozenset[str]:
        """Returns the names of all tensors of the buckets."""
        return frozenset(name for bucket in self._buckets for name in bucket.names)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all buckets."""
        return sum(map(bucket_bytes, self._buckets))

    async def open(self) -> None:
        """Form the group of the learner's rank 0 and every rank of every server."""
        self._buckets = decode_buckets(await self._ask(encode_request(ListBuckets())))
        limit_s, size = self._config.try_s, self._fleet.world().size
        there = await self._ask(encode_request(ListenForBroadcast(size, limit_s)))
        host, port = decode_address(there)
        join = JoinGroup(size, self._group, self._backend, limit_s)
        await both(
            self._done(join),
            self._fleet.init_weights_group(host, port, self._group, self._backend, limit_s),
        )

    async def reopen(self) -> None:
        """Form another group, with the servers that the fleet has now."""
        await self._fleet.destroy_weights_group(self._group)
        await self._ask(encode_request(LeaveGroup()))
        self._group = new_group_name()
        await self.open()

    @property
    def stages(self) -> bool:
        """Returns that it does not."""
        return False

    async def stage(self, version: int) -> None:
        """Do nothing: SGLang loads every bucket at once."""

    async def send(self, version: int) -> None:
        """Let every server receive each bucket while the learner broadcasts them."""
        await both(self._done(SendBuckets()), self._receive())

    async def close(self) -> None:
        """Let the servers leave the group."""
        await self._fleet.destroy_weights_group(self._group)

    async def _receive(self) -> None:
        for bucket in self._buckets:
            await self._fleet.update_bucket(bucket, self._group, self._config.try_s)

    async def _done(self, request: JoinGroup | SendBuckets) -> None:
        """Let the learner's rank 0 do it. WeightSyncFailed, with what it says: it could not."""
        failure = decode_failure(await self._ask(encode_request(request)))
        if failure is not None:
            raise WeightSyncFailed(failure)


def bucket_bytes(bucket: BucketSpec) -> int:
    """Return the bytes of one flattened bucket.

    Raises ValueError for a dtype that is never sent.
    """
    total = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        if dtype.removeprefix("torch.") not in PLAIN_BYTES:
            raise ValueError(f"{name}: dtype {dtype} is not one of {sorted(PLAIN_BYTES)}")
        total += math.prod(shape) * PLAIN_BYTES[dtype.removeprefix("torch.")]
    return total


def _learner_part(full: FullTensors, config: Config) -> LearnerPart:
    from megatron_opd.weight_sync.broadcast_sender import BroadcastSender

    settings = config.weight_sync
    return BroadcastSender(full, settings.host, settings.bucket_bytes, settings.round_to)


BROADCAST = TransportKind(Broadcast, _learner_part)
