"""Defines what the two parts of the broadcast say to each other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_opd.weight_sync.decoding import decoded
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

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_FAILURE = msgspec.msgpack.Decoder(str | None)
_ADDRESS = msgspec.msgpack.Decoder(tuple[str, int])
_BUCKETS = msgspec.msgpack.Decoder(tuple[BucketSpec, ...])


def encode_request(request: Request) -> bytes:
    """Encode what Broadcast asks of the learner."""
    return _ENCODER.encode(request)


def decode_request(request: bytes) -> Request:
    """Decode what Broadcast asks of the learner. BadMessage: it is anything else."""
    return decoded(_REQUESTS, request)


def encode_buckets(buckets: Sequence[BucketSpec]) -> bytes:
    """Encode the answer to ListBuckets."""
    return _ENCODER.encode(buckets)


def decode_buckets(answer: bytes) -> tuple[BucketSpec, ...]:
    """Decode the answer to ListBuckets. BadMessage: it is anything else."""
    return decoded(_BUCKETS, answer)


def encode_failure(failure: str | None) -> bytes:
    """Encode the answer to JoinGroup and SendBuckets."""
    return _ENCODER.encode(failure)


def decode_failure(answer: bytes) -> str | None:
    """Decode the answer to JoinGroup and SendBuckets. BadMessage: it is anything else."""
    return decoded(_FAILURE, answer)


def encode_address(host: str, port: int) -> bytes:
    """Encode the answer to Listen."""
    return _ENCODER.encode((host, port))


def decode_address(answer: bytes) -> tuple[str, int]:
    """Decode the answer to Listen. BadMessage: it is anything else."""
    return decoded(_ADDRESS, answer)
