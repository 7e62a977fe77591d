"""Defines what the controller and a worker process say to each other over their socket.

Invariant: a message is a length of four bytes and msgpack that msgspec decodes into a typed record;
nothing that arrives is executed.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, TypeVar

import msgspec

MAX_REPLY_BYTES = 2**16
"""Replies are a number or two short lines; a longer one is not a worker's."""
_LENGTH_BYTES = 4


class Call(msgspec.Struct, frozen=True):
    """Names a function of a response and an answer by its import path, with keyword arguments.

    warm: the path of a function to call once, before the first response; None: there is none.
    """

    path: str
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    warm: str | None = None


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Tells a new worker its verifiers, by task, and how much address space it may have."""

    calls: dict[str, Call]
    memory_bytes: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Asks the verifier of `task` about one response."""

    task: str
    response: str
    answer: str


class VerifierReady(msgspec.Struct, frozen=True, tag=True):
    """Says that every verifier is imported."""


class Judgement(msgspec.Struct, frozen=True, tag=True):
    """Gives a reward in [0, 1]."""

    reward: float


class FailedReply(msgspec.Struct, frozen=True, tag=True):
    """Says why there is no reward: VerifierFailed as it was raised in the worker."""

    reason: str
    detail: str


Request = Setup | Ask
Reply = VerifierReady | Judgement | FailedReply
MessageT = TypeVar("MessageT")
Decoder = msgspec.msgpack.Decoder[MessageT] | msgspec.json.Decoder[MessageT]
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def framed(message: Request | Reply) -> bytes:
    """Return a message as it goes through the socket."""
    return with_length(_ENCODER.encode(message))


def with_length(body: bytes) -> bytes:
    """Return bytes behind their length, which read_body reads."""
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_body(reader: asyncio.StreamReader, most_bytes: int, what: str) -> bytes:
    """Read the next bytes that with_length framed; what: names them in errors.

    EOFError: the other end is gone; ValueError: there are more than `most_bytes`.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > most_bytes:
        raise ValueError(f"{what} has at most {most_bytes} bytes, got {length}")
    return await reader.readexactly(length)


def decoded(decoder: Decoder[MessageT], body: bytes) -> MessageT:
    """Return the message that bytes hold. ValueError: they hold none, or one nested without end."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read a worker's next message. EOFError: it is gone; ValueError: this is no message."""
    return decoded(_REPLIES, await read_body(reader, MAX_REPLY_BYTES, "a reply"))


def receive_request(connection: socket.socket) -> Request:
    """Wait for the controller's next message. EOFError: it has closed the socket."""
    length = int.from_bytes(_received(connection, _LENGTH_BYTES), "big")
    return _REQUESTS.decode(_received(connection, length))


def _received(connection: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 2**20))
        if not part:
            raise EOFError("the controller has closed the socket")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
