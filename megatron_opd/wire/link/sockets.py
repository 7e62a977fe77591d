"""Makes the sockets of links: a peer can make this process hold so much for it and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import zmq
import zmq.asyncio

from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.gate import guard_socket
from megatron_opd.wire.link.wire import MAX_FRAME_EXTRA, Buffer

FRAMES_WAITING = 16
"""Messages of a connection that wait for this process; then TCP holds the sender up."""
LEAVING_WAITING = 1024
"""Messages to a peer that wait for TCP. Far fewer are ever on their way to one that reads."""
LINGER_MS = 200


def prepared(context: zmq.asyncio.Context, kind: int, settings: LinkConfig) -> zmq.asyncio.Socket:
    """Return a new socket with the limits and heartbeats of a link."""
    socket = context.socket(kind)
    guard_socket(socket, settings.chunk_bytes + MAX_FRAME_EXTRA)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.RCVHWM, FRAMES_WAITING)
    socket.set(zmq.SNDHWM, LEAVING_WAITING)
    # ours notice a break; ZeroMQ's only clear up connections that nobody speaks on
    socket.set(zmq.HEARTBEAT_IVL, round(settings.silence_s * 1000))
    socket.set(zmq.HEARTBEAT_TIMEOUT, round(settings.silence_s * 1000))
    return socket


def put(socket: zmq.asyncio.Socket, frames: Sequence[Buffer]) -> bool:
    """Send without waiting; returns whether it could be."""
    sent = cast("asyncio.Future[Any]", socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False))
    return sent.exception() is None  # with NOBLOCK it is done
