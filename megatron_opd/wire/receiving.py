"""Receives from ZeroMQ without waiting.

ZeroMQ drops what it had ready when a connection ends. So a receive that may wait, after a poll that
found a message, can wait for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import zmq
import zmq.asyncio


def received(socket: zmq.asyncio.Socket) -> list[zmq.Frame] | None:
    """Return the frames of the next message; None: there is none."""
    got = cast("asyncio.Future[Any]", socket.recv_multipart(flags=zmq.NOBLOCK, copy=False))
    error = got.exception()  # with NOBLOCK it is done
    if error is None:
        return got.result()
    if isinstance(error, zmq.Again):
        return None
    raise error


def received_now(socket: zmq.Socket[Any]) -> list[zmq.Frame] | None:
    """Return the frames of the next message, of a socket outside asyncio; None: there is none."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
