"""Connects a rank to the controller.

Heads receive requests and pass them to the ranks that share their samples; every rank can report
its own failure. Invariant: a rank that was welcomed ends at most HEARTBEAT_MS and
HEARTBEAT_TIMEOUT_MS after its controller, or the way to it, is gone, whatever it is doing then:
messages may have been lost, so it does not reconnect.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import zmq

from megatron_opd.learner.share_broadcast import share_header
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
from megatron_opd.wire.dealer import Connected, Dealer, Disconnected, LostHow
from megatron_opd.wire.keys import FILE_VARIABLE, KEYS_FILE, RankKeys
from megatron_opd.wire.sockets import PeerMessage, SocketLimits, wait_for_any
from sglang_bridge.errors import one_line
from sglang_bridge.lifetime import EXIT_LOST

if TYPE_CHECKING:
    from megatron_opd.learner.world import World

POLL_S = 0.5
SAY_EVERY_S = 30.0
LINGER_MS = 2000
# the keys of an earlier controller may lie where the new one's will be
KEYS_GRACE_S = 30.0

_REFUSED = (LostHow.KEY_REFUSED, LostHow.KEY_UNKNOWN, LostHow.MALFORMED)


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
        self._limits = SocketLimits(max_bytes)
        self._context = zmq.Context()
        self._dealer: Dealer | None = None
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
        while True:
            for event in self._events(POLL_S):
                match event:
                    case PeerMessage():
                        return self._welcomed(event.buffers)
                    case Connected():
                        wrong_since_s = None
                        self.reply(hello)
                    case Disconnected(how) if how in _REFUSED:
                        wrong_since_s = wrong_since_s or time.monotonic()
                    case Disconnected():
                        pass
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
        assert self._dealer is not None, "the controller's keys were there"
        self._dealer.send([encode(message)])

    def report(self, error: BaseException, *, final: bool) -> None:
        """Tell the controller why this rank ends, in one line. final: see messages.Failed."""
        if self._dealer is None:
            self._show_keys()
        if self._dealer is None:
            return  # no controller has ever been here
        rank = int(os.environ.get("RANK", "0"))
        # A ValueError already speaks to the user: it names key, rule and value.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        self.reply(RankError(rank, one_line(f"{kind}{error}", 1000), final, self._attempt))

    def receive(self, world: World) -> tuple[Request, list[memoryview]]:
        """Return the next request, on every rank of the model copy; on its head the raw frames too.

        BadMessage.
        """
        assert self._dealer is not None, "it has joined"
        header, *frames = self._dealer.receive() if world.is_head else [memoryview(b"")]
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
        if self._dealer is not None:
            self._dealer.close(LINGER_MS)
        self._context.term()

    def _show_keys(self) -> None:
        """Connect with the current keys, if they are known and have changed.

        A refused connection is tried again by ZeroMQ, with the same keys.
        """
        keys = self._keys()
        if keys is None or keys == self._shown:
            return
        if self._dealer is not None:
            self._dealer.close()
        self._shown = keys
        self._dealer = Dealer(
            self._context, self.address, keys.controller, keys.secret, self._limits
        )

    def _events(self, wait_s: float) -> Iterator[PeerMessage | Connected | Disconnected]:
        """Yield what has come after at most `wait_s`."""
        self._show_keys()
        dealers = [] if self._dealer is None else [self._dealer]
        wait_for_any(dealers, wait_s)
        for dealer in dealers:
            while (event := dealer.next_now()) is not None:
                yield event

    def _welcomed(self, frames: list[memoryview]) -> RankWelcome:
        answer = decode_request(frames[0])
        if isinstance(answer, RankRefused):
            raise NotWelcome(one_line(answer.reason, 1000))
        if not isinstance(answer, RankWelcome):
            raise BadMessage(f"the controller answered a hello with {type(answer).__name__}")
        self._attempt = answer.attempt
        assert self._dealer is not None
        self._dealer.watch(self._ended)
        return answer

    def _ended(self) -> None:
        if not self._leaving.is_set():
            self._on_lost(f"the controller at {self.address} is gone: this rank ends")

    def _lacking(self) -> str:
        return f"no {KEYS_FILE} in run.dir yet" if self._shown is None else "no answer"

    def _say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
