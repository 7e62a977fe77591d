"""Defines lanes: how a message's numbers reach a rank on the same host beside the group.

The sender exports memory, its own lane's or where the numbers lie, as a descriptor of a fixed size;
the receiver opens it and copies from there. Descriptors travel through the group, and so does the
word that the numbers have been taken. Nothing that came through the group is unpickled: every
lane encodes its descriptors itself and checks all that it opens.

Which ranks use lanes is agreed once for a group (same_host.py), and forgotten with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

DESCRIPTOR_BYTES = 128
RING_BYTES = 64 << 20
"""Memory of a lane, which numbers are packed into."""
LEG_BYTES = RING_BYTES // 4
"""Bytes packed at once: while they are unpacked, the next ones are packed. With smaller legs, what
gloo spends on descriptors and acknowledgements costs more than copies through sockets."""


class BadDescriptor(RuntimeError):
    """Reports that a descriptor does not name memory that this rank may or can open."""


class Lane(Protocol):
    """Holds memory of this rank that ranks on the same host can open. memory: bytes to pack into.

    leg_bytes: the most that are packed at once, a multiple of every dtype's size.
    """

    memory: torch.Tensor
    leg_bytes: int

    def export(self, numbers: torch.Tensor) -> bytes:
        """Return the descriptor of numbers in `memory`, once they are there.

        They must stay as they are until the receiver has taken them.
        """
        ...

    def where_it_lies(self, view: torch.Tensor) -> bytes | None:
        """Return the descriptor of a view where it lies; None: others cannot open that memory."""
        ...

    def hide(self) -> None:
        """Let nobody open the memory who has not opened it yet."""
        ...


class Opener(Protocol):
    """Copies from memory that one other rank exports."""

    def nbytes(self, descriptor: bytes) -> int:
        """Return how many bytes a descriptor names. BadDescriptor: they are not that rank's."""
        ...

    def copy(self, descriptor: bytes, offset: int, view: torch.Tensor, dtype: torch.dtype) -> None:
        """Begin to fill `view` with the numbers of `dtype` that lie `offset` bytes further on.

        BadDescriptor: they cannot be read.
        """
        ...

    def taken(self) -> None:
        """Wait until all that has been begun is copied."""
        ...


@dataclass(frozen=True)
class Lanes:
    """Says how this rank of a group exchanges numbers with ranks on its host.

    own: what it sends from. takers: the ranks that have opened it. openers: by rank, of those whose
    memory this rank has opened.
    """

    own: Lane | None = None
    takers: frozenset[int] = frozenset()
    openers: Mapping[int, Opener] = field(default_factory=dict)


NONE = Lanes()
_LANES: WeakKeyDictionary[Hashable, Lanes] = WeakKeyDictionary()


def use_lanes(group: Hashable, lanes: Lanes) -> None:
    """Let messages in `group` take these lanes, as long as it is there."""
    _LANES[group] = lanes


def lanes_of(group: Hashable) -> Lanes:
    """Return the lanes of `group`, those that were agreed on or none."""
    return _LANES.get(group, NONE)


def forget_lanes(group: Hashable) -> None:
    """Give back the memory of the lanes of `group`, which no message uses any more."""
    _LANES.pop(group, None)
