"""A rank's connection to the controller.

Heads receive requests and hand them to the ranks that share their samples; every rank can report
its own failure.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_opd.transport.messages import Failed, Reply, Request, decode_request, encode

if TYPE_CHECKING:
    from megatron_opd.learner.setup import World

POLL_MS = 500
RECONNECT_S = 15.0
LINGER_MS = 2000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 60_000


class ControllerLost(ConnectionError):
    """The controller is gone: this rank must end."""


class Channel:
    """One DEALER socket to `address`.

    first_s: how long to wait for the controller to appear; it may be started after the learner.
    reconnect_s: how long it may be out of reach later.
    """

    def __init__(self, address: str, first_s: float, reconnect_s: float = RECONNECT_S) -> None:
        self.address, self._limit_s, self._reconnect_s = address, first_s, reconnect_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        )
        self._lost_since: float | None = time.monotonic()
        self._socket.connect(address)

    def reply(self, message: Reply) -> None:
        """Send to the controller."""
        self._socket.send(encode(message))

    def report(self, error: BaseException) -> None:
        """Tell the controller why this rank ends, in one line."""
        rank = int(os.environ.get("RANK", "0"))
        # A ValueError already speaks to the user: it names key, rule and value.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        self.reply(Failed(rank, " ".join(f"{kind}{error}".split())))

    def receive(self, world: World) -> tuple[Request, list[memoryview]]:
        """The next request and its raw frames, on every rank of the model copy.

        ControllerLost: the connection has been down for too long.
        """
        frames = self._receive_frames() if world.is_head else []
        frames = share_frames(frames, world)
        return decode_request(frames[0]), frames[1:]

    def close(self) -> None:
        """Send what is queued (for at most LINGER_MS) and close."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)  # an open one would keep term() waiting for ever
        self._socket.close()
        self._context.term()

    def _receive_frames(self) -> list[memoryview]:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(POLL_MS))
            if self._monitor in ready:
                connected = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_CONNECTED
                self._lost_since = None if connected else time.monotonic()
                self._limit_s = self._reconnect_s
            if self._socket in ready:
                return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
            lost_s = 0.0 if self._lost_since is None else time.monotonic() - self._lost_since
            if lost_s > self._limit_s:
                raise ControllerLost(f"no controller at {self.address} for {self._limit_s:g} s")


def share_frames(frames: list[memoryview], world: World) -> list[memoryview]:
    """The head's frames on every rank of its model copy; two broadcasts, raw bytes."""
    if world.parallel.world_size == world.parallel.dp:
        return frames
    head, group = world.head, world.model_group
    count = torch.tensor([len(frames)], dtype=torch.int64)
    dist.broadcast(count, src=head, group=group)
    sizes = torch.tensor([frame.nbytes for frame in frames] or [0] * int(count), dtype=torch.int64)
    dist.broadcast(sizes, src=head, group=group)
    if world.is_head:
        blob = torch.frombuffer(bytearray().join(frames), dtype=torch.uint8)
    else:
        blob = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    dist.broadcast(blob, src=head, group=group)
    return [part.numpy().data for part in blob.split(sizes.tolist())]
