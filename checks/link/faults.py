"""Faults inside a process of a link, below the encryption; and an end that never sends again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from checks.link.proxy import flipped
from megatron_opd.wire.link import ends
from megatron_opd.wire.link.sending import SendLane
from megatron_opd.wire.link.wire import Buffer

KEPT = 200
KINDS = ("damaged", "repeated", "replayed", "lost")


class Faults:
    """Stands where frames leave, and harms a share of them; `done` counts, by kind."""

    def __init__(self, share: float, seed: int) -> None:
        self.done = dict.fromkeys(KINDS, 0)
        self._share, self._chance = share, random.Random(seed)
        self._kept: list[list[bytes]] = []
        self._put = ends.put

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let every frame of this process pass through here."""
        ends.put = self.put
        try:
            yield
        finally:
            ends.put = self._put

    def put(self, socket: Any, frames: Sequence[Buffer]) -> bool:
        """Send frames, or what becomes of them."""
        if len(frames) < 2:
            return self._put(socket, frames)
        kept = [bytes(frame) for frame in frames]
        self._kept = [*self._kept[-KEPT:], kept]
        if self._chance.random() >= self._share:
            return self._put(socket, kept)
        kind = self._chance.choice(KINDS)
        self.done[kind] += 1
        if kind == "damaged":
            return self._put(socket, [*kept[:-1], flipped(kept[-1], self._chance)])
        if kind == "lost":
            return True
        if kind == "replayed":  # over the connection of now
            other = self._chance.choice(self._kept)
            self._put(socket, [*kept[:-2], *other[-2:]])
        else:
            self._put(socket, kept)
        return self._put(socket, kept)


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
