"""Faults inside a process of a link, below the encryption; and an end that never sends again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import zmq

from checks.link.proxy import flipped
from megatron_opd.wire.dealer import Dealer
from megatron_opd.wire.link import ends
from megatron_opd.wire.link.sending import SendLane
from megatron_opd.wire.router import Router
from megatron_opd.wire.sockets import Buffer

KEPT = 200
KINDS = ("damaged", "repeated", "replayed", "lost")


class Faults:
    """Stands where frames leave, and harms a share of them; `done` counts, by kind."""

    def __init__(self, share: float, seed: int) -> None:
        self.done = dict.fromkeys(KINDS, 0)
        self._share, self._chance = share, random.Random(seed)
        self._kept: list[list[bytes]] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let every frame of this process's links pass through here."""
        put = self.put

        class HarmedRouter(Router):
            def _send(self, frames: Sequence[Buffer]) -> None:
                put(super()._send, frames)

        class HarmedDealer(Dealer):
            def _send(self, frames: Sequence[Buffer]) -> None:
                put(super()._send, frames)

        ends.Router, ends.Dealer = HarmedRouter, HarmedDealer
        try:
            yield
        finally:
            ends.Router, ends.Dealer = Router, Dealer

    def put(self, send: Callable[[Sequence[Buffer]], None], frames: Sequence[Buffer]) -> None:
        """Send frames, or what becomes of them."""
        if len(frames) < 2:
            return send(frames)
        kept = [bytes(frame) for frame in frames]
        self._kept = [*self._kept[-KEPT:], kept]
        if self._chance.random() >= self._share:
            return send(kept)
        kind = self._chance.choice(KINDS)
        self.done[kind] += 1
        if kind == "damaged":
            return send([*kept[:-1], flipped(kept[-1], self._chance)])
        if kind == "lost":
            return None
        other = self._chance.choice(self._kept) if kind == "replayed" else kept
        with contextlib.suppress(zmq.ZMQError):  # it may name no connection
            send([*kept[:-2], *other[-2:]])  # over the connection of now
        return send(kept)


@contextlib.contextmanager
def never_send_again() -> Iterator[None]:
    """Make this process forget what it sent, whatever the other end has."""
    resume, told = SendLane.resume, SendLane.told

    def resume_without(lane: SendLane, arrived: int, settled: int) -> int:
        lane.arrived = lane.settled = lane.sent
        return 0

    def told_once(lane: SendLane, arrived: int, settled: int, *, again: bool) -> int:
        if arrived < lane.arrived:
            return 0
        return told(lane, arrived, settled, again=False)

    SendLane.resume, SendLane.told = resume_without, told_once
    try:
        yield
    finally:
        SendLane.resume, SendLane.told = resume, told
