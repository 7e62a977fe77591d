"""Defines what a run, the host of its environments and their processes say to each other.

Invariant: a message is one that msgspec decodes into a typed record; nothing that arrives is
executed. To the host each is one packet of JSON, which an agent's reads without our packages; to an
environment msgpack, with a length of four bytes before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megatron_opd.data.chats import ChatMessage
from megatron_opd.data.verifiers.messages import decoded, read_body, with_length
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.guarded import EnvironmentLimits
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.words import Answered

PACKET_BYTES = 2**17
"""Largest message to or from the host, which a socket of Linux takes at once."""


class HostSetup(msgspec.Struct, frozen=True, tag=True):
    """Tells a host its environment, and the address space of each process in bytes."""

    kind: str
    options: dict[str, Any]
    limits: EnvironmentLimits
    memory_bytes: int


class OpenEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Asks for a process; its socket comes with the packet. number: of the process, from 0."""

    number: int


class EndEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Asks that the process of this number be killed, if there still is one."""

    number: int


class HostReady(msgspec.Struct, frozen=True, tag=True):
    """Says that the environment can be made, and gives its tools."""

    tools: Sequence[Mapping[str, Any]]


class HostRefused(msgspec.Struct, frozen=True, tag=True):
    """Says in one line why it cannot."""

    detail: str


class StartAsk(msgspec.Struct, frozen=True, tag=True):
    """Asks what the student reads first."""

    row: EnvironmentRow


class StepAsk(msgspec.Struct, frozen=True, tag=True):
    """Asks what is said to a turn."""

    reply: Reply


class StartSaid(msgspec.Struct, frozen=True, tag=True):
    """Gives a conversation's beginning and its tools."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]


class StepSaid(msgspec.Struct, frozen=True, tag=True):
    """Gives what is said to a turn."""

    answered: Answered


class AnswerFailed(msgspec.Struct, frozen=True, tag=True):
    """Says why there is no answer: EnvironmentFailed as it was raised."""

    reason: str
    detail: str


Message = HostSetup | OpenEnvironment | EndEnvironment | HostReady | HostRefused
Ask = StartAsk | StepAsk
HostAnswer = StartSaid | StepSaid | AnswerFailed
_ENCODER = msgspec.msgpack.Encoder()
_PACKETS: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_ASKS: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_SAID: msgspec.msgpack.Decoder[HostAnswer] = msgspec.msgpack.Decoder(HostAnswer)


def packet(message: Message) -> bytes:
    """Return a message as one packet. ValueError: it is longer."""
    body = msgspec.json.encode(message)
    if len(body) > PACKET_BYTES:
        raise ValueError(
            "environment: the arguments and the tools must each have at most "
            f"{PACKET_BYTES} bytes, got {len(body)}"
        )
    return body


def unpacked(body: bytes) -> Message:
    """Return the message of a packet. ValueError: it is none."""
    return _PACKETS.decode(body)


def framed(message: Ask | HostAnswer) -> bytes:
    """Return a message as it goes through an environment's socket. Raises what msgspec does."""
    return with_length(_ENCODER.encode(message))


async def read_ask(reader: asyncio.StreamReader) -> Ask:
    """Read the next question. EOFError: the run has closed the socket."""
    return _ASKS.decode(await read_body(reader, 2**32, "a question"))


async def read_said(reader: asyncio.StreamReader, most_bytes: int) -> HostAnswer:
    """Read the next answer. EOFError: its process is gone; ValueError: this is no message."""
    return decoded(_SAID, await read_body(reader, most_bytes, "an answer"))
