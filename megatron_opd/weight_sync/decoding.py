"""Reads records that two processes of a run send each other."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from megatron_opd.transport.messages import BadMessage
from sglang_bridge.errors import one_line

MessageT = TypeVar("MessageT")


def decoded(decoder: msgspec.msgpack.Decoder[MessageT], data: bytes | memoryview) -> MessageT:
    """Decode a message. BadMessage: it is anything else."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadMessage(f"no message of this protocol: {one_line(str(error))}") from None
