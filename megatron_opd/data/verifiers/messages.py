"""Defines what the controller and a worker process say to each other over their socket.

Invariant: a message is a length of four bytes and msgpack that msgspec decodes into a typed record;
nothing that arrives is executed.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

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
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def framed(message: Request | Reply) -> bytes:
    """Return a message as it goes through the socket."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read a worker's next message. EOFError: it is gone; ValueError: this is no message."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > MAX_REPLY_BYTES:
        raise ValueError(f"a reply has at most {MAX_REPLY_BYTES} bytes, got {length}")
    return _REPLIES.decode(await reader.readexactly(length))


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
