"""Carries messages to ranks on the same host: descriptors and acknowledgements through the group.

All messages from one rank to another are one stream of numbers, in their order, which travels in
legs. For each leg the sender packs numbers into its lane's memory, or lets them lie, and rings: a
descriptor. The receiver copies the numbers to where they belong and acknowledges. Only then is the
memory used again, and changed no earlier.

A leg holds part of a message, or several small ones: a receiver takes whatever comes, until the
message that it waits for is complete. So a message may come earlier than its turn among all of a
rank's, never later, and no two ranks can wait for each other, as without lanes (message_order.py).
Each leg stands where its first message stands. Take the first leg, or message without a lane, of
that order which has not landed at both ends. All earlier ones have, so its sender has their memory
back and packs and rings, and its receiver waits for nothing else; to take it the receiver needs
nobody. Acknowledgements need no memory and no turn: whoever rings already waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sglang_bridge.weights.flat import Flat, part
from sglang_bridge.weights.lanes import DESCRIPTOR_BYTES, BadDescriptor, Lane, Opener

RUNG, ACKNOWLEDGED = 1 << 30, 1 << 29
"""Tags, above those of messages; two, as ranks may send to each other. Legs keep their order."""
UNDER_WAY = 16
"""Acknowledgements on their way at once."""
ALIGNED = 64
"""Bytes: every piece begins at a multiple of it, as numbers of any dtype may."""


class Ring:
    """Gives out pieces of `size` bytes, a multiple of ALIGNED."""

    def __init__(self, size: int) -> None:
        assert size > 0
        assert size % ALIGNED == 0, size
        self._size = size
        # counted on and on; their places are the remainders by the size
        self._head = self._tail = 0
        self._ends: deque[int] = deque()

    def take(self, nbytes: int) -> int | None:
        """Return where a piece of `nbytes` begins; None: give one back first."""
        needed = -(-nbytes // ALIGNED) * ALIGNED
        assert 0 < needed <= self._size, nbytes
        if not self._ends:
            self._head = self._tail = 0
        at = self._head % self._size
        start = self._head if at + needed <= self._size else self._head - at + self._size
        if start + needed - self._tail > self._size:
            return None
        self._head = start + needed
        self._ends.append(self._head)
        return start % self._size

    def give_back(self) -> None:
        """Take back the piece that was lent first."""
        self._tail = self._ends.popleft()


class Rung:
    """Holds a leg that is on its way: its descriptor, and the acknowledgement to come."""

    def __init__(self, group: ProcessGroup, peer: int, descriptor: bytes) -> None:
        said = torch.frombuffer(bytearray(descriptor), dtype=torch.uint8)
        self._works = (
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, ACKNOWLEDGED),
            group.send([said], peer, RUNG),
        )

    def wait(self) -> None:
        """Wait until the receiver has taken the numbers."""
        for work in reversed(self._works):
            work.wait()


class Outbox:
    """Packs messages into a lane's memory. One thread at a time may send from a lane."""

    def __init__(self, lane: Lane) -> None:
        self.where_it_lies, self.leg_bytes = lane.where_it_lies, lane.leg_bytes
        self._lane = lane
        self._ring = Ring(lane.memory.numel())

    def pack(
        self,
        views: Iterator[torch.Tensor],
        dtype: torch.dtype,
        nbytes: int,
        land: Callable[[], None],
    ) -> Iterator[bytes]:
        """Yield the descriptor of every leg of `nbytes`, the numbers of `views` as `dtype`.

        land: waits for the first leg that is on its way; `landed` is to be called then.
        """
        numbers = Flat(views)
        while nbytes > 0:
            length = min(nbytes, self._lane.leg_bytes)
            while (start := self._ring.take(length)) is None:
                land()
            place = self._lane.memory[start : start + length]
            numbers.fill(place.view(dtype))
            yield self._lane.export(place)
            nbytes -= length

    def landed(self) -> None:
        """Use the memory of the first leg again, which has been packed and taken."""
        self._ring.give_back()


class Inbox:
    """Takes the stream of numbers that one rank sends. nbytes: of all that is to come, more than 0.

    places: the views that they belong in, in order, with the dtype in which their numbers come.
    """

    def __init__(
        self,
        group: ProcessGroup,
        peer: int,
        opener: Opener,
        places: Iterator[tuple[torch.Tensor, torch.dtype]],
        nbytes: int,
    ) -> None:
        self._group, self._peer, self._opener = group, peer, opener
        self._places, self._place = places, (torch.empty(0), torch.uint8)
        self._at = self._taken = 0
        self._nbytes = nbytes
        self._acknowledged: deque[Any] = deque()
        self._listen()

    def reach(self, nbytes: int) -> None:
        """Wait until so many bytes have been taken since the beginning."""
        while self._taken < nbytes:
            self._bell.wait()
            descriptor = self._descriptor.numpy().tobytes()
            left = self._nbytes - self._taken
            coming = self._opener.nbytes(descriptor)
            if not 0 < coming <= left:
                raise BadDescriptor(f"{coming} bytes, of {left} that are to come")
            if coming < left:
                self._listen()
            self._take(descriptor, coming)
            self._acknowledge()

    def end(self) -> None:
        """Wait until the last acknowledgement has left."""
        while self._acknowledged:
            self._acknowledged.popleft().wait()

    def _listen(self) -> None:
        self._descriptor = torch.empty(DESCRIPTOR_BYTES, dtype=torch.uint8)
        self._bell: Any = self._group.recv([self._descriptor], self._peer, RUNG)

    def _take(self, descriptor: bytes, nbytes: int) -> None:
        offset = 0
        while offset < nbytes:
            view, dtype = self._place
            if self._at == view.numel():
                self._place, self._at = next(self._places), 0
                continue
            count = min((nbytes - offset) // dtype.itemsize, view.numel() - self._at)
            if not count:
                raise BadDescriptor(f"{nbytes} bytes, which end within a number of {dtype}")
            for piece in part(view, self._at, self._at + count):
                self._opener.copy(descriptor, offset, piece, dtype)
                offset += piece.numel() * dtype.itemsize
            self._at += count
        self._opener.taken()
        self._taken += nbytes

    def _acknowledge(self) -> None:
        if len(self._acknowledged) >= UNDER_WAY:
            self._acknowledged.popleft().wait()
        said = [torch.ones(1, dtype=torch.uint8)]
        self._acknowledged.append(self._group.send(said, self._peer, ACKNOWLEDGED))
