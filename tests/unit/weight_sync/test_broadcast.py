"""The broadcast's own messages and sizes; its exchange is in test_session.py."""

import msgspec
import pytest

from megatron_opd.weight_sync.broadcast import bucket_bytes
from megatron_opd.weight_sync.broadcast_messages import decode_buckets, decode_request
from megatron_opd.wire.codec import BadMessage
from sglang_bridge.protocol import BucketSpec


def test_bucket_bytes_refuses_unknown_dtypes():
    with pytest.raises(ValueError, match="w: dtype float8 is not one of"):
        bucket_bytes(BucketSpec(("w",), ("float8",), ((2, 2),)))


@pytest.mark.parametrize("frame", [b"", b"\x80", msgspec.msgpack.encode({"type": "Stop"})])
def test_anything_else_is_no_request(frame: bytes):
    with pytest.raises(BadMessage):
        decode_request(frame)


@pytest.mark.parametrize("answer", [b"", msgspec.msgpack.encode([["w"]])])
def test_anything_else_is_no_list_of_buckets(answer: bytes):
    with pytest.raises(BadMessage):
        decode_buckets(answer)
