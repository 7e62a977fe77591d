"""What a stranger may try on the controller's socket, and what it could record of the learner."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import zmq

from checks.security.raw import Door, Outcome, drip, flood, send, send_and_leave
from megatron_opd.transport.messages import RankError, encode
from megatron_opd.wire.keys import RankKeys, RunKeys

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG_COMMAND, LONG_MESSAGE = b"\x06", b"\x02"
GIGABYTE = 1 << 30
FORGED = encode(RankError(0, "\x1b[2J\x1b[31mall is lost\n"))
"""What would end the run, in red letters, if it were heard."""
SLOW = 50
SLOW_S = 25.0
"""Longer than the 10 s that a handshake may take."""


def attacks(door: Door, controller: bytes, recorded: bytes) -> dict[str, Callable[[], Outcome]]:
    """Every attack by name. controller: its public key; recorded: what a true rank sent."""
    stranger = RunKeys.make()
    length = GIGABYTE.to_bytes(8, "big")
    return {
        "no keys": lambda: speak(door, None),
        "a key of its own": lambda: speak(door, RankKeys(controller, stranger.learner)),
        "another run's learner": lambda: speak(door, stranger.ranks),
        "replay of a true rank's bytes": lambda: send(door, recorded),
        "garbage": lambda: send(door, os.urandom(1 << 16)),
        "garbage after a greeting": lambda: send(door, GREETING + os.urandom(1 << 16)),
        "escape codes": lambda: send(door, b"\x1b[2J\x1b[31mred\x07\r\n" * 100),
        "HTTP": lambda: send(door, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(80)),
        "1 GB command": lambda: flood(
            door, GREETING + LONG_COMMAND + length, GIGABYTE, greeted=True
        ),
        "1 GB message": lambda: flood(
            door, GREETING + LONG_MESSAGE + length, GIGABYTE, greeted=True
        ),
        "truncated, left": lambda: send_and_leave(door, recorded[: len(recorded) // 2]),
        "truncated, held": lambda: send(door, recorded[: len(GREETING) + 20], SLOW_S),
        "slow-loris": lambda: drip(door, recorded, SLOW, 0.5, SLOW_S),
    }


def speak(door: Door, keys: RankKeys | None, wait_s: float = 2.0) -> Outcome:
    """Send FORGED as ZeroMQ does, with these keys or none; closed: nothing came back."""
    started = time.monotonic()
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.reconnect_ivl = -1
        if keys is not None:
            peer.curve_serverkey, peer.curve_secretkey = keys.controller, keys.secret
            peer.curve_publickey = zmq.curve_public(keys.secret)
        peer.connect(f"tcp://{door.host}:{door.port}")
        sent = True
        try:
            peer.send(FORGED, zmq.NOBLOCK)
        except zmq.Again:
            sent = False
        answered = bool(peer.poll(int(wait_s * 1000)))
        answer = peer.recv() if answered else b""
    took = time.monotonic() - started
    return Outcome(1, len(FORGED) * sent, took, closed=not answered, answer=answer)


def record(door: Door, keys: RankKeys, message: bytes) -> bytes:
    """What a true rank sends: its handshake, and `message`, which the controller hears."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        relay = threading.Thread(target=_relay, args=(listener, door, heard), daemon=True)
        relay.start()
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 1000
            peer.curve_serverkey, peer.curve_secretkey = keys.controller, keys.secret
            peer.curve_publickey = zmq.curve_public(keys.secret)
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send(message)
            if not peer.poll(10_000):
                raise RuntimeError("the controller did not answer a true rank")
        relay.join(10)
    return bytes(heard)


def _relay(listener: socket.socket, door: Door, heard: bytearray) -> None:
    inner, _ = listener.accept()
    with inner, door.connect() as outer:
        back = threading.Thread(target=_copy, args=(outer, inner, bytearray()), daemon=True)
        back.start()
        _copy(inner, outer, heard)
        back.join(5)


def _copy(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
    try:
        while data := source.recv(1 << 16):
            heard += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the other end is gone
