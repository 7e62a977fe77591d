"""What the two parts of a weight transport say to each other -> a request, or its answer."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, msgpack_bytes
from megatron_opd.weight_sync import broadcast_messages as broadcast
from megatron_opd.weight_sync import disk_messages as disk
from megatron_opd.weight_sync import shards_messages as shards
from megatron_opd.wire.codec import BadMessage
from sglang_bridge.protocol import BucketSpec

BUCKETS = (BucketSpec(("model.norm.weight",), ("bfloat16",), ((64,),)),)
URL = "http://127.0.0.1:1"
WHOLE: dict[str, tuple[Callable[[bytes], Any], Callable[..., bytes], tuple[bytes, ...]]] = {
    "requests": (
        broadcast.decode_request,
        broadcast.encode_request,
        tuple(
            broadcast.encode_request(request)
            for request in (
                *(
                    broadcast.ListBuckets(),
                    broadcast.ListenForBroadcast(3, 60.0),
                    broadcast.SendBuckets(),
                ),
                *(broadcast.JoinGroup(3, "g", "gloo", 60.0), broadcast.LeaveGroup()),
            )
        ),
    ),
    "buckets": (
        broadcast.decode_buckets,
        broadcast.encode_buckets,
        (broadcast.encode_buckets(BUCKETS), broadcast.encode_buckets(())),
    ),
    "failure": (
        broadcast.decode_failure,
        broadcast.encode_failure,
        (broadcast.encode_failure(None), broadcast.encode_failure("rank 1: timed out")),
    ),
    "address": (
        broadcast.decode_address,
        lambda found: broadcast.encode_address(found),
        (broadcast.encode_address(("127.0.0.1", 29500)),),
    ),
    "shards": (
        shards.decode,
        shards.encode,
        tuple(
            shards.encode(message)
            for message in (
                shards.ListenForShards(4, 60.0),
                shards.Listening("127.0.0.1", 5, "gloo", ("a0", "")),
                shards.Join(
                    "h", 5, 4, "g", "gloo", 60.0, ((URL, 2, 1),), "bfloat16", True, (1, -1)
                ),
                *(shards.Leave(), shards.SendOutcome(("rank 0: out of memory",))),
                *(shards.SendShards(True), shards.StartSending(3), shards.FinishSending()),
            )
        ),
    ),
    "disk": (
        disk.decode,
        disk.encode,
        tuple(
            disk.encode(message)
            for message in (
                *(disk.Open("/x", "run", "bfloat16"), disk.Write("v3", 3, False, "v2")),
                *(disk.Written(99), disk.DiskRefused("no space left")),
            )
        ),
    ),
}
Given = tuple[str, bytes]
"""Which message, and its bytes."""


def call(given: Given) -> Any:
    """Read it."""
    kind, data = given
    return WHOLE[kind][0](data)


def oracle(given: Given, found: Any) -> str | None:
    """It is the same message when it is sent on, and holds no more than what is read of it."""
    kind, data = given
    decode, encode, _ = WHOLE[kind]
    again = encode(found)
    if encode(decode(again)) != again:
        return "a message is another one when it is sent on"
    if isinstance(found, msgspec.Struct):
        try:
            tree = msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return "a message that cannot be read"
        named = {*found.__struct_fields__, "type"}
        if not isinstance(tree, dict) or not tree.keys() <= named:
            return "fields that are none"
    return None


def _makers(wholes: tuple[bytes, ...]) -> tuple[Any, Any]:
    trees = [msgspec.msgpack.decode(whole) for whole in wholes]
    return damaged_tree([tree for tree in trees if tree is not None], most=2), damaged_bytes(wholes)


MAKERS = {kind: _makers(wholes) for kind, (_, _, wholes) in WHOLE.items()}


def make(rng: Random) -> Given:
    """One message after damage to its tree or its bytes."""
    kind = rng.choice(list(WHOLE))
    trees, raw = MAKERS[kind]
    return kind, msgpack_bytes(trees(rng)) if rng.random() < 0.7 else raw(rng)


TARGET = Target("weight_messages", make, call, (BadMessage,), oracle)
