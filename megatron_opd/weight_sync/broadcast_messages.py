"""Defines what the two parts of the broadcast say to each other."""

from __future__ import annotations

import msgspec

from megatron_opd.wire.codec import Codec
from sglang_bridge.protocol import BucketSpec


class ListBuckets(msgspec.Struct, frozen=True, tag=True):
    """Asks for the buckets of every weight sync, in the order in which they are sent."""


class ListenForBroadcast(msgspec.Struct, frozen=True, tag=True):
    """Asks rank 0 to listen for a group of `world_size`; it answers with (host, port)."""

    world_size: int
    timeout_s: float


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Asks rank 0 to form the group where it listens; it answers why not, if it could not."""

    world_size: int
    group_name: str
    backend: str
    timeout_s: float


class SendBuckets(msgspec.Struct, frozen=True, tag=True):
    """Asks to broadcast every bucket once; rank 0 answers why not, if it could not."""


class LeaveGroup(msgspec.Struct, frozen=True, tag=True):
    """Asks rank 0 to leave the group, if it is in one."""


Request = ListBuckets | ListenForBroadcast | JoinGroup | SendBuckets | LeaveGroup

_REQUESTS, _BUCKETS = Codec[Request](Request), Codec[tuple[BucketSpec, ...]](tuple[BucketSpec, ...])
_FAILURES, _ADDRESSES = Codec[str | None](str | None), Codec[tuple[str, int]](tuple[str, int])
# What they decode raises BadMessage where it is anything else.
encode_request, decode_request = _REQUESTS.encode, _REQUESTS.decode
"""For what Broadcast asks of the learner."""
encode_buckets, decode_buckets = _BUCKETS.encode, _BUCKETS.decode
"""For the answer to ListBuckets."""
encode_failure, decode_failure = _FAILURES.encode, _FAILURES.decode
"""For the answer to JoinGroup and SendBuckets: why not, None: it is done."""
encode_address, decode_address = _ADDRESSES.encode, _ADDRESSES.decode
"""For the answer to ListenForBroadcast: host and port."""
