"""Bytes and ZeroMQ messages to the controller's listening socket -> who becomes its learner.

A controller listens in a thread of this process for as long as the process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import zmq
from zmq.utils import z85

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes
from checks.security.raw import Door
from checks.security.zmq_attacks import GREETING, record
from megatron_opd.errors import LearnerError
from megatron_opd.transport.messages import RankError, encode
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.wire.keys import RankKeys, RunKeys
from tests.support.wire import config, hello

KEYS = RunKeys(z85.encode(bytes(range(32))), z85.encode(bytes(range(32, 64))))
HELLO = encode(hello())
WAIT_S, SETTLE_S = 30.0, 0.003
Given = tuple[str, bytes]
"""How it is sent (bytes, or with a key), and what."""


class Refused(ValueError):
    """The controller counted it and believes what it did before."""


class Wire:
    """The controller, its door, and what a true rank once said."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        thread.start()
        logger = logging.getLogger("megatron_opd.transport.remote_learner")
        logger.addFilter(lambda record: record.thread != thread.ident)  # this controller's alone
        self.remote = self.on_loop(self._listen)
        self.door = Door("127.0.0.1", int(self.remote.address.rpartition(":")[2]))
        self.recorded = record(self.door, KEYS.ranks, HELLO)
        self.forget()
        self.settle()

    async def _listen(self) -> RemoteLearner:
        remote = RemoteLearner(config(), Admission(KEYS, {}, 512))
        self._waits = asyncio.ensure_future(self._for_ever(remote))
        return remote

    async def _for_ever(self, remote: RemoteLearner) -> None:
        while True:
            with contextlib.suppress(LearnerError):  # it is read from remote.failure
                await remote.wait_ready(3600.0)
            await asyncio.sleep(0.001)

    def on_loop(self, make: Callable[[], Any]) -> Any:
        """Run a coroutine on the controller's loop and return what it returns."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(WAIT_S)

    def forget(self) -> None:
        """Be as if nobody had joined."""

        async def start_over() -> None:
            self.remote.start_over()

        self.on_loop(start_over)

    def settle(self) -> None:
        """Wait until all is counted: a message, and the end of its connection, count each."""
        count = -1
        while count != self.remote.frames_refused:
            count = self.remote.frames_refused
            time.sleep(SETTLE_S)


@cache
def wire() -> Wire:
    """The one of this process."""
    return Wire()


def call(given: Given) -> str:
    """Send it. Returns what the controller believes now that it did not before."""
    at, (kind, data) = wire(), given
    before = at.remote.frames_refused
    (_send_bytes if kind == "bytes" else _send_with_key)(at.door, data)
    until = time.monotonic() + WAIT_S
    while at.remote.frames_refused == before and not (at.remote.ready or at.remote.failure):
        assert time.monotonic() < until, "neither refused nor heard"
        time.sleep(0.0005)
    joined, failure = at.remote.ready, at.remote.failure
    if joined or failure is not None:
        at.forget()
    at.settle()
    if failure is not None and kind == "key" and not joined:
        raise Refused(str(failure))
    if failure is None and not joined:
        raise Refused("counted")
    return f"joined={joined} failure={failure}"


def _send_bytes(door: Door, data: bytes) -> None:
    with door.connect() as connection:
        connection.settimeout(WAIT_S)
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        except OSError:
            return  # it has hung up


def _send_with_key(door: Door, data: bytes) -> None:
    ranks: RankKeys = KEYS.ranks
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = int(WAIT_S * 1000)
        peer.curve_serverkey, peer.curve_secretkey = ranks.controller, ranks.secret
        peer.curve_publickey = zmq.curve_public(ranks.secret)
        peer.connect(f"tcp://{door.host}:{door.port}")
        peer.send(data)


def oracle(given: Given, believed: str) -> str | None:
    """Only a rank with the key joins, and only with a whole hello or a reason to end."""
    return None if given[0] == "key" else f"a stranger was heard: {believed}"


BYTES = damaged_bytes([GREETING, GREETING + bytes(200), HELLO])
MESSAGES = damaged_bytes([HELLO, encode(RankError(0, "all is lost"))])


def make(rng: Random) -> Given:
    """A recorded connection, whole or damaged, a greeting and more, or a message of a true rank."""
    drawn = rng.random()
    if drawn < 0.2:
        return "key", HELLO
    if drawn < 0.3:
        return "key", MESSAGES(rng)
    if drawn < 0.7:
        recorded = damaged_bytes([wire().recorded])(rng)
        return "bytes", wire().recorded if rng.random() < 0.1 else recorded
    return "bytes", BYTES(rng)


# every input is a connection
TARGET = Target("learner_socket", make, call, (Refused,), oracle, share=0.25)
