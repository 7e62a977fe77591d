"""Frames between controller and worker: whole, typed, bounded."""

import asyncio
import socket

import pytest

from megatron_opd.data.verifiers.messages import (
    MAX_REPLY_BYTES,
    Ask,
    Call,
    FailedReply,
    Judgement,
    Setup,
    VerifierReady,
    framed,
    read_reply,
    receive_request,
    with_length,
)


def read(data: bytes):
    async def scenario():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_reply(reader)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "message", [VerifierReady(), Judgement(0.25), FailedReply("verifier_failed", "why")]
)
def test_replies_arrive_as_they_were_sent(message):
    assert read(framed(message)) == message


@pytest.mark.parametrize(
    "message",
    [Setup({"mine": Call("a:b", {"x": 1})}, 2**30), Ask("mine", "é" * 10**5, "42")],
)
def test_requests_arrive_as_they_were_sent(message):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data = framed(message)
        ours.settimeout(30)
        sent = ours.send(data[:3])  # in pieces
        sent += ours.send(data[sent : sent + 1000])
        asyncio.run(_rest(ours, data[sent:], theirs, message))


async def _rest(ours, rest, theirs, message):
    received = asyncio.create_task(asyncio.to_thread(receive_request, theirs))
    await asyncio.to_thread(ours.sendall, rest)
    assert await received == message


def test_what_is_no_reply_is_refused():
    with pytest.raises(EOFError):
        read(framed(Judgement(1.0))[:-1])
    with pytest.raises(ValueError, match="at most"):
        read((MAX_REPLY_BYTES + 1).to_bytes(4, "big") + b"x" * 10)
    with pytest.raises(ValueError, match="Invalid value"):
        read(b"\0\0\0\x0f" + b"\x81\xa4type\xa8nonsense")
    with pytest.raises(ValueError, match="Setup"):
        read(framed(Setup({}, 1)))
    nested = (
        framed(Judgement(1.0))[4:].replace(b"\x82", b"\x83") + b"\xa1x" + b"\x91" * 20_000 + b"\1"
    )
    with pytest.raises(ValueError, match="nested too deeply"):
        read(with_length(nested))


def test_a_closed_socket_is_the_end():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        with pytest.raises(EOFError):
            receive_request(theirs)
