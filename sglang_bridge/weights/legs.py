"""Carries messages to ranks on the same host: descriptors and acknowledgements through the group.

A message takes one or more legs. For each the sender packs numbers into its lane's memory, or lets
them lie, and rings: a descriptor. The receiver copies the numbers into its views and acknowledges.
Only then the memory is used again, and changed no earlier.

All legs of a message have its tag, and arrive in order. Receivers need not know how many there are:
a descriptor names its bytes, and the last one completes the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sglang_bridge.weights.flat import Flat
from sglang_bridge.weights.lanes import DESCRIPTOR_BYTES, BadDescriptor, Lane, Opener
from sglang_bridge.weights.ring import Ring

ACKNOWLEDGED = 1 << 30
"""Added to a message's tag: two ranks may both send to each other."""


class Rung:
    """Holds a leg that is on its way: its descriptor, and the acknowledgement to come."""

    def __init__(self, group: ProcessGroup, peer: int, tag: int, descriptor: bytes) -> None:
        self._answer = torch.empty(1, dtype=torch.uint8)
        self._works = (
            group.recv([self._answer], peer, tag + ACKNOWLEDGED),
            group.send([_as_tensor(descriptor)], peer, tag),
        )

    def wait(self) -> None:
        """Wait until the receiver has taken the numbers."""
        for work in reversed(self._works):
            work.wait()


class Bell:
    """Holds the descriptor of a leg that is to come."""

    def __init__(self, group: ProcessGroup, peer: int, tag: int) -> None:
        self._descriptor = torch.empty(DESCRIPTOR_BYTES, dtype=torch.uint8)
        self._work: Any = group.recv([self._descriptor], peer, tag)

    def wait(self) -> None:
        """Wait until it is here."""
        self._work.wait()

    @property
    def descriptor(self) -> bytes:
        """Returns it, once it is here."""
        return self._descriptor.numpy().tobytes()


def acknowledge(group: ProcessGroup, peer: int, tag: int) -> Any:
    """Say that the numbers of a leg are taken; returns what to wait for."""
    return group.send([torch.ones(1, dtype=torch.uint8)], peer, tag + ACKNOWLEDGED)


class Outbox:
    """Packs messages into a lane's memory. One thread at a time may send from a lane."""

    def __init__(self, lane: Lane) -> None:
        self.where_it_lies = lane.where_it_lies
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
    """Unpacks one message that comes in legs. nbytes: of the message, of numbers of `dtype`."""

    def __init__(
        self, opener: Opener, views: tuple[torch.Tensor, ...], dtype: torch.dtype, nbytes: int
    ) -> None:
        self._opener, self._numbers = opener, Flat(views)
        self._dtype, self.left = dtype, nbytes

    def take(self, descriptor: bytes) -> None:
        """Copy a leg's numbers into the views. BadDescriptor: they are not what is to come."""
        nbytes, itemsize = self._opener.nbytes(descriptor), self._dtype.itemsize
        if not 0 < nbytes <= self.left or nbytes % itemsize:
            raise BadDescriptor(f"{nbytes} bytes, of a message that lacks {self.left}")
        offset = 0
        for view in self._numbers.next(nbytes // itemsize):
            self._opener.copy(descriptor, offset, view, self._dtype)
            offset += view.numel() * itemsize
        self._opener.taken()
        self.left -= nbytes


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
