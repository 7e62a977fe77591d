"""A receive takes what is there, and waits for nothing."""

import asyncio

import pytest
import zmq
import zmq.asyncio

from megatron_opd.wire.receiving import received, received_now
from tests.support.link_ends import drive


def test_a_receive_takes_what_is_there_and_waits_for_nothing():
    async def body() -> None:
        with (
            zmq.asyncio.Context() as context,
            context.socket(zmq.PAIR) as near,
            context.socket(zmq.PAIR) as far,
        ):
            near.bind("inproc://pair")
            far.connect("inproc://pair")
            assert received(near) is None
            await far.send_multipart([b"a", b"b"])
            while not (found := received(near)):  # noqa: ASYNC110  a look has no event
                await asyncio.sleep(0.01)
            assert [frame.bytes for frame in found] == [b"a", b"b"]
            assert received(near) is None

    drive(body)


def test_a_socket_that_cannot_be_read_says_so():
    async def body() -> None:
        with (
            zmq.asyncio.Context() as context,
            context.socket(zmq.PUSH) as push,
            pytest.raises(zmq.ZMQError, match="not supported"),
        ):
            received(push)

    drive(body)


def test_outside_asyncio_it_does_so_too():
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as near,
        context.socket(zmq.PAIR) as far,
    ):
        near.bind("inproc://pair")
        far.connect("inproc://pair")
        assert received_now(near) is None
        far.send_multipart([b"a", b"b"])
        near.poll(5000)
        found = received_now(near)
        assert found is not None
        assert [frame.bytes for frame in found] == [b"a", b"b"]
        assert received_now(near) is None
        with (
            context.socket(zmq.PUSH) as push,
            pytest.raises(zmq.ZMQError, match="not supported"),
        ):
            received_now(push)
