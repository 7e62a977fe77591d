"""Sends and receives messages of weights between two ranks of a group, point to point.

A message is the numbers of some views, end to end. Both ends pass through their messages in the
same order. A message of one view that lies in memory as it travels is sent from there, or received
to there, without a copy. Any other one is packed into one of two buffers, or unpacked from it,
while those before it are on their way.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

BUFFERS = 2
IN_FLIGHT = 16
"""Messages that are on their way at once: enough that no rank waits for the next one's name."""


@dataclass(frozen=True, slots=True)
class Message:
    """Describes one message. peer: the other end's rank in the group. views: live memory.

    names: of the views' tensors, for whoever changes them on the way. dtype: in which they travel.
    """

    peer: int
    names: tuple[str, ...]
    views: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Returns its bytes on the way."""
        return self.dtype.itemsize * sum(view.numel() for view in self.views)


@dataclass(frozen=True, slots=True)
class PassedOn:
    """Describes a message that is sent on. number: of the one, among those received, it holds."""

    message: Message
    number: int


class PeerLost(RuntimeError):
    """Reports that a message was not taken or did not come. peer: the other end's rank."""

    def __init__(self, peer: int, cause: str) -> None:
        self.peer, self.cause = peer, cause
        super().__init__(f"rank {peer} of the group: {self.cause}")


Read = Callable[[str, torch.Tensor], torch.Tensor]


def as_it_is(name: str, view: torch.Tensor) -> torch.Tensor:
    """Return `view` itself: nothing is changed on the way."""
    return view


def send(
    group: ProcessGroup,
    messages: Sequence[Message],
    device: torch.device,
    read: Read = as_it_is,
) -> None:
    """Send every message; returns when the last one has left.

    device: where the group wants its buffers. read: what to send in place of a view.
    PeerLost: the peer did not take a message within the group's timeout.
    """
    flight = _Flight(messages, device, packs_all=read is not as_it_is)
    with torch.no_grad():
        for message, tag in _tagged(messages):
            slot = flight.slot(message)
            if slot.buffer is not None:
                named = zip(message.names, message.views, strict=True)
                for place, (name, view) in zip(slot.places(), named, strict=True):
                    place.copy_(read(name, view))
            with _with_peer(message.peer):
                work = group.send([slot.wire], message.peer, tag)
            flight.add(work, slot)
        while flight.is_on:
            flight.land()


def receive(group: ProcessGroup, messages: Sequence[Message], device: torch.device) -> None:
    """Receive every message into its views.

    PeerLost: the peer did not send a message within the group's timeout.
    """
    flight = _Flight(messages, device, unpacks=True)
    with torch.no_grad():
        for message, tag in _tagged(messages):
            slot = flight.slot(message)
            with _with_peer(message.peer):
                work = group.recv([slot.wire], message.peer, tag)
            flight.add(work, slot)
        while flight.is_on:
            flight.land()


def relay(group: ProcessGroup, steps: Sequence[Message | PassedOn], device: torch.device) -> None:
    """Receive the messages into their views, and pass some of them on, in the order of `steps`.

    What is passed on is sent from the views, once it is there. PeerLost: as in send and receive.
    """
    arriving = [step for step in steps if isinstance(step, Message)]
    leaving = [step.message for step in steps if isinstance(step, PassedOn)]
    # each has buffers of its own: none waits for one that only a later message would free
    inward = _Flight(arriving, device, unpacks=True)
    outward = _Flight(leaving, device)
    receipts, sends = _tagged(arriving), _tagged(leaving)
    with torch.no_grad():
        for step in steps:
            if isinstance(step, Message):
                message, tag = next(receipts)
                slot = inward.slot(message)
                with _with_peer(message.peer):
                    work = group.recv([slot.wire], message.peer, tag)
                inward.add(work, slot)
                continue
            while inward.landed <= step.number:
                inward.land()
            message, tag = next(sends)
            slot = outward.slot(message)
            if slot.buffer is not None:
                for place, view in zip(slot.places(), message.views, strict=True):
                    place.copy_(view)
            with _with_peer(message.peer):
                work = group.send([slot.wire], message.peer, tag)
            outward.add(work, slot)
        for flight in (inward, outward):
            while flight.is_on:
                flight.land()


@dataclass(frozen=True, slots=True)
class _Slot:
    """Describes where a message's numbers are or come to. buffer: None: its one view itself."""

    message: Message
    numbers: torch.Tensor
    buffer: torch.Tensor | None

    @property
    def wire(self) -> torch.Tensor:
        """Returns the numbers as bytes: not every backend knows every dtype."""
        return self.numbers.view(torch.uint8)

    def places(self) -> Iterator[torch.Tensor]:
        """Yield the part of the numbers that belongs to each view, in its shape."""
        offset = 0
        for view in self.message.views:
            yield self.numbers[offset : offset + view.numel()].view(view.shape)
            offset += view.numel()


class _Flight:
    """Holds the messages that are on their way, in order, and the buffers of the packed ones.

    packs_all: no message travels from where it lies. unpacks: those in buffers are received.
    landed: how many are there, or have left.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        device: torch.device,
        *,
        packs_all: bool = False,
        unpacks: bool = False,
    ) -> None:
        self._device = device
        self._packs_all, self._unpacks = packs_all, unpacks
        self._under_way: deque[tuple[Any, _Slot]] = deque()
        self.landed = 0
        packed = [message.nbytes for message in messages if not self._lies_ready(message)]
        self._free = deque(
            torch.empty(max(packed), dtype=torch.uint8, device=device)
            for _ in range(min(BUFFERS, len(packed)))
        )

    @property
    def is_on(self) -> bool:
        """Returns whether any message is on its way."""
        return bool(self._under_way)

    def slot(self, message: Message) -> _Slot:
        """Return a slot, once one is free and fewer than IN_FLIGHT messages are on their way."""
        lies_ready = self._lies_ready(message)
        while len(self._under_way) >= IN_FLIGHT or not (lies_ready or self._free):
            self.land()
        if lies_ready:
            return _Slot(message, message.views[0].view(-1), None)
        buffer = self._free.popleft()
        return _Slot(message, buffer[: message.nbytes].view(message.dtype), buffer)

    def add(self, work: Any, slot: _Slot) -> None:
        """Add a message that has been started."""
        self._under_way.append((work, slot))

    def land(self) -> None:
        """Wait for the first message that is on its way, and free its buffer."""
        work, slot = self._under_way.popleft()
        with _with_peer(slot.message.peer):
            work.wait()
        self.landed += 1
        if slot.buffer is None:
            return
        if self._unpacks:
            for place, view in zip(slot.places(), slot.message.views, strict=True):
                view.copy_(place)
        self._free.append(slot.buffer)

    def _lies_ready(self, message: Message) -> bool:
        if self._packs_all or len(message.views) != 1:
            return False
        (view,) = message.views
        is_there = view.dtype == message.dtype and view.device.type == self._device.type
        return is_there and view.is_contiguous()


@contextmanager
def _with_peer(peer: int) -> Iterator[None]:
    """Make a failure of the group one of `peer`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(peer, said_plainly(error)) from None


def said_plainly(error: BaseException) -> str:
    """Return the first sentence of what gloo or NCCL says, without the place in its source."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.\w+:\d+\]\s*", "", line).split(". ")[0]


def _tagged(messages: Sequence[Message]) -> Iterator[tuple[Message, int]]:
    """Yield each message with its number among those of the same two ranks."""
    numbers: Counter[int] = Counter()
    for message in messages:
        yield message, numbers[message.peer]
        numbers[message.peer] += 1
