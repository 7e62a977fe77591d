"""Encodes and decodes the records that two processes send each other: msgpack by msgspec."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from sglang_bridge.errors import one_line

MessageT = TypeVar("MessageT")
ENCODER = msgspec.msgpack.Encoder()
"""Encodes the records of both directions, where a module has a codec for each."""


class BadMessage(ValueError):
    """Reports in one line that what arrived is not a message of this protocol."""


class Codec(Generic[MessageT]):
    """Encodes and decodes messages of one type, which may be a union of tagged records.

    kind: MessageT once more, since a union is no `type[MessageT]` to a type checker.
    problem: begins the line of BadMessage, before what msgspec says.
    """

    def __init__(self, kind: object, problem: str = "no message of this protocol") -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kind)
        self._problem = problem

    def encode(self, message: MessageT) -> bytes:
        """Encode a message as one frame."""
        return ENCODER.encode(message)

    def decode(self, frame: bytes | bytearray | memoryview) -> MessageT:
        """Decode a frame. BadMessage, and nothing else: it is anything but such a message."""
        try:
            return self._decoder.decode(frame)
        # ValueError: also text that is not UTF-8
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadMessage(f"{self._problem}: {one_line(str(error))}") from None
