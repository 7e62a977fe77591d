"""Admits to a socket only peers whose public keys it was given, and says by name who they are.

Keys are checked while a connection is opened (ZMTP's CURVE mechanism, answered as in ZeroMQ's
RFC 27), so no message of a stranger is buffered or decoded. CURVE shows the peer that it found whom
it looked for, too, encrypts everything, and takes no recorded byte a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils import z85

from megatron_opd.wire.sockets import EVENTS_A_TURN, received

ZAP_ADDRESS = "inproc://zeromq.zap.01"
# addresses whose refusals are counted one by one; those of further ones are counted together
MAX_ADDRESSES = 256
OTHERS = "others"


def show_keys(socket: zmq.Socket[Any], server: bytes, secret: bytes) -> None:
    """Make a socket that is about to connect show its key, to the holder of `server` alone.

    server: the public key of whom it connects to. secret: its own. Both in Z85.
    """
    socket.set(zmq.CURVE_SERVERKEY, server)
    socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    socket.set(zmq.CURVE_SECRETKEY, secret)


def name_of(frame: zmq.Frame) -> str:
    """Return the name of the peer that sent `frame`, as the socket's gate knows its key."""
    return str(frame.get("User-Id"))


class Gate:
    """Guards `socket`, the only one of its context; make it before the socket is bound.

    socket: readable when a connection waits for `answer`. refused: number of refused keys by the
    address that showed them.
    """

    def __init__(self, guarded: zmq.Socket[Any], secret: bytes, peers: Mapping[str, bytes]) -> None:
        """Guard a socket whose own secret key is `secret`.

        peers: public keys of those who are admitted, by name (see `name_of`). All keys in Z85.
        """
        self._names = {z85.decode(key): name.encode() for name, key in peers.items()}
        self.refused: Counter[str] = Counter()
        self.socket: zmq.Socket[bytes] = guarded.context.socket(zmq.REP)
        self.socket.bind(ZAP_ADDRESS)
        guarded.set(zmq.CURVE_SERVER, 1)
        guarded.set(zmq.CURVE_SECRETKEY, secret)
        guarded.set(zmq.ZAP_DOMAIN, b"gate")

    def answer(self) -> None:
        """Admit or refuse the connections that wait; at most so many that others have a turn."""
        for _ in range(EVENTS_A_TURN):
            frames = received(self.socket)
            if frames is None:
                return
            version, request, _, address, _, mechanism, *shown = (frame.bytes for frame in frames)
            key = shown[0] if mechanism == b"CURVE" and len(shown) == 1 else b""
            name = self._names.get(key)  # public keys: how long this takes is no secret
            if name is None:
                self._count(address.decode("ascii", "replace"))
            verdict = (
                (b"400", b"not a key of this run", b"") if name is None else (b"200", b"OK", name)
            )
            self.socket.send_multipart([version, request, *verdict, b""])

    def _count(self, address: str) -> None:
        known = address in self.refused or len(self.refused) < MAX_ADDRESSES
        self.refused[address if known else OTHERS] += 1

    def close(self) -> None:
        """Admit nobody any more."""
        self.socket.close(linger=0)
