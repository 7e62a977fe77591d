"""Connects a rank to the controller.

Heads receive requests and pass them to the ranks that share their samples; every rank can report
its own failure. Invariant: a rank that was welcomed ends at most HEARTBEAT_MS and
HEARTBEAT_TIMEOUT_MS after its controller, or the way to it, is gone, whatever it is doing then:
messages may have been lost, so it does not reconnect.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_opd.learner.handing_out import share_header
from megatron_opd.transport.messages import (
    RankError,
    RankHello,
    RankRefused,
    RankWelcome,
    Reply,
    Request,
    decode_request,
    encode,
)
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.gate import guard_socket, show_keys
from megatron_opd.wire.keys import FILE_VARIABLE, KEYS_FILE, RankKeys
from megatron_opd.wire.receiving import received_now
from sglang_bridge.errors import one_line
from sglang_bridge.lifetime import EXIT_LOST

if TYPE_CHECKING:
    from megatron_opd.learner.world import World

POLL_S = 0.5
SAY_EVERY_S = 30.0
LINGER_MS = 2000
# the keys of an earlier controller may lie where the new one's will be
KEYS_GRACE_S = 30.0

_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
# AUTH: the controller does not know our key. NO_DETAIL: it could not read our first message, which
# only the owner of the public key that we hold could.
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_LOST, _CLOSED = zmq.EVENT_DISCONNECTED, zmq.EVENT_MONITOR_STOPPED


class ControllerLost(ConnectionError):
    """Reports that there is no controller for this rank, which must end."""


class NotWelcome(ValueError):
    """Reports in one line that the controller does not accept this rank."""


def end_process(reason: str) -> None:
    """Say why in one line and exit at once, also from the middle of a collective."""
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_LOST)


class ControllerChannel:
    """Opens one DEALER socket to `address`.

    keys: asked for this rank's part of the run's keys, which may not be there yet. max_bytes: the
    largest frame that is accepted. first_s: how long to wait for the controller to appear; it may
    be started after the learner. on_lost: called from a thread once a controller that welcomed us
    is out of reach.
    """

    def __init__(
        self,
        address: str,
        keys: Callable[[], RankKeys | None],
        *,
        first_s: float,
        max_bytes: int,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        self.address, self._keys, self._first_s = address, keys, first_s
        self._on_lost = on_lost
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.RCVHWM, 0)
        guard_socket(self._socket, max_bytes)
        events = _CONNECTED | _REFUSED | _LOST | _CLOSED
        self._monitor: Any = self._socket.get_monitor_socket(events)
        self._watcher: threading.Thread | None = None
        self._leaving = threading.Event()
        self._shown: RankKeys | None = None
        self._attempt = ""  # of the welcome

    def join(self, hello: RankHello) -> RankWelcome:
        """Say hello until the controller answers.

        ControllerLost: there is none for `first_s`. NotWelcome: it has other keys, expects other
        settings, or has this rank already.
        """
        started_s = said_s = time.monotonic()
        wrong_since_s: float | None = None
        connected = False
        while True:
            self._show_keys()
            for event in self._events(POLL_S):
                if event == _CONNECTED:
                    connected, wrong_since_s = True, None
                    self.reply(hello)
                elif event == _LOST:
                    connected = False
                elif event & _REFUSED:
                    wrong_since_s = wrong_since_s or time.monotonic()
            if (answer := received_now(self._socket)) is not None:
                welcome = self._welcomed([frame.buffer for frame in answer])
                if not connected:  # it has ended since, and the monitor says so only once
                    self._on_lost(self._gone())
                return welcome
            now_s = time.monotonic()
            if wrong_since_s is not None and now_s - wrong_since_s > KEYS_GRACE_S:
                raise NotWelcome(
                    f"the controller at {self.address} has other keys than this rank: name the "
                    f"same file in {FILE_VARIABLE} on both sides, or let the learner see the "
                    "controller's run.dir"
                )
            if now_s - started_s > self._first_s:
                raise ControllerLost(f"no controller at {self.address} within {self._first_s:g} s")
            if hello.rank == 0 and now_s - said_s > SAY_EVERY_S:
                said_s = now_s
                self._say(f"waiting for a controller at {self.address}: {self._lacking()}")

    def reply(self, message: Reply) -> None:
        """Send a message to the controller."""
        self._socket.send(encode(message))

    def report(self, error: BaseException, *, final: bool) -> None:
        """Tell the controller why this rank ends, in one line. final: see messages.Failed."""
        if self._shown is None:
            self._show_keys()
        if self._shown is None:
            return  # no controller has ever been here
        rank = int(os.environ.get("RANK", "0"))
        # A ValueError already speaks to the user: it names key, rule and value.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        self.reply(RankError(rank, one_line(f"{kind}{error}", 1000), final, self._attempt))

    def receive(self, world: World) -> tuple[Request, list[memoryview]]:
        """Return the next request, on every rank of the model copy; on its head the raw frames too.

        BadMessage.
        """
        header, *frames = self._receive_frames() if world.is_head else [memoryview(b"")]
        request = decode_request(share_header(header, world))
        if isinstance(request, RankWelcome | RankRefused):
            raise BadMessage(f"the controller sent {type(request).__name__} in the middle of a run")
        return request, frames

    def leave(self) -> None:
        """Stop watching: from now on the controller may end."""
        self._leaving.set()

    def close(self) -> None:
        """Send what is queued (for at most LINGER_MS) and close."""
        self.leave()
        self._socket.disable_monitor()
        if self._watcher is not None:
            self._watcher.join()
        self._monitor.close(linger=0)  # an open one would keep term() waiting for ever
        self._socket.close()
        self._context.term()

    def _show_keys(self) -> None:
        """Connect with the current keys, if they are known and have changed.

        A refused connection is tried again by ZeroMQ, with the same keys.
        """
        keys = self._keys()
        if keys is None or keys == self._shown:
            return
        if self._shown is not None:
            with contextlib.suppress(zmq.ZMQError):  # a refused connection may have gone by itself
                self._socket.disconnect(self.address)
        self._shown = keys
        show_keys(self._socket, keys.controller, keys.secret)
        self._socket.connect(self.address)

    def _events(self, wait_s: float) -> list[int]:
        """Return the connection's events, in order; waits for at most `wait_s`."""
        found: list[int] = []
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(int(wait_s * 1000))
        while self._monitor.poll(0):
            found.append(recv_monitor_message(self._monitor)["event"])
        return found

    def _welcomed(self, frames: list[memoryview]) -> RankWelcome:
        answer = decode_request(frames[0])
        if isinstance(answer, RankRefused):
            raise NotWelcome(one_line(answer.reason, 1000))
        if not isinstance(answer, RankWelcome):
            raise BadMessage(f"the controller answered a hello with {type(answer).__name__}")
        self._attempt = answer.attempt
        self._watcher = threading.Thread(target=self._watch, name="controller", daemon=True)
        self._watcher.start()
        return answer

    def _watch(self) -> None:
        """Watch the connection from a thread of its own, which ends with `close`."""
        while True:
            event = recv_monitor_message(self._monitor)["event"]
            if event == _CLOSED:
                return
            if event == _LOST and not self._leaving.is_set():
                self._on_lost(self._gone())

    def _receive_frames(self) -> list[memoryview]:
        return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]

    def _gone(self) -> str:
        return f"the controller at {self.address} is gone: this rank ends"

    def _lacking(self) -> str:
        return f"no {KEYS_FILE} in run.dir yet" if self._shown is None else "no answer"

    def _say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
