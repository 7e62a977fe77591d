"""Sends and receives messages of weights between two ranks of a group, point to point.

A message is the numbers of some views, end to end. Both ends pass through their messages in the
same order. A message of one view that lies in memory as it travels is sent from there, or received
to there, without a copy. Any other one is packed into one of two buffers, or unpacked from it,
while those before it are on their way.

Between ranks on one host the numbers pass through memory that both see, where the group has lanes
(lanes.py, legs.py); the group then carries what is said about them.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sglang_bridge.weights.lanes import lanes_of
from sglang_bridge.weights.legs import Inbox, Outbox, Rung
from sglang_bridge.weights.posting import await_work, is_nccl, post_recv, post_send

BUFFERS = 2
IN_FLIGHT = 16
"""Messages that are on their way at once: enough that no rank waits for the next one's name."""
BESIDE_TRAINING = 1
"""The same through NCCL, while the rank trains. Learner ranks on GPUs have one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS). A message queued behind one that waits for its receiver would hold up
all work behind it, among it the collective that another rank waits for before it can send, and
which the receiver expects first: none would ever end. What runs already holds nothing up."""


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
    *,
    beside_training: bool = False,
) -> None:
    """Send every message; returns when the last one has left.

    device: where the group wants its buffers. read: what to send in place of a view.
    beside_training: whether this rank takes part in other groups' collectives meanwhile.
    PeerLost: the peer did not take a message within the group's timeout.
    """
    lanes = lanes_of(group)
    outbox = None if lanes.own is None else Outbox(lanes.own)
    if outbox is not None:
        messages = _merged(messages, lanes.takers, outbox.leg_bytes)
    by_group = [message for message in messages if message.peer not in lanes.takers]
    packs_all = read is not as_it_is
    most = BESIDE_TRAINING if beside_training and is_nccl(group) else IN_FLIGHT
    with (
        torch.no_grad(),
        _Flight(group, by_group, device, packs_all=packs_all, most=most) as flight,
    ):
        for message, tag in _tagged(messages):
            if outbox is not None and message.peer in lanes.takers:
                for descriptor, landed in _legs(outbox, message, read, flight):
                    with _WithPeer(message.peer):
                        rung = Rung(group, message.peer, descriptor)
                    flight.add(message.peer, rung, landed)
                continue
            slot = flight.slot(message)
            if slot.buffer is not None:
                for place, view in zip(slot.places(), _read(message, read), strict=True):
                    place.copy_(view)
            with _WithPeer(message.peer):
                work = post_send(group, slot.wire, message.peer, tag)
            flight.add(message.peer, work, partial(flight.free, slot))
        flight.end()


def receive(group: ProcessGroup, messages: Sequence[Message], device: torch.device) -> None:
    """Receive every message into its views.

    PeerLost: the peer did not send a message within the group's timeout.
    """
    inboxes = _inboxes(group, messages)
    by_group = [message for message in messages if message.peer not in inboxes]
    nbytes: Counter[int] = Counter()
    with torch.no_grad(), _Flight(group, by_group, device) as flight:
        for message, tag in _tagged(messages):
            peer = message.peer
            if peer in inboxes:
                nbytes[peer] += message.nbytes
                flight.add(peer, _Turn(inboxes[peer], nbytes[peer]), _nothing)
                continue
            slot = flight.slot(message)
            with _WithPeer(peer):
                work = post_recv(group, slot.wire, peer, tag)
            flight.add(peer, work, partial(flight.unpack, slot))
        flight.end()
        for peer, inbox in inboxes.items():
            with _WithPeer(peer):
                inbox.end()


def _merged(messages: Sequence[Message], peers: frozenset[int], limit: int) -> list[Message]:
    """Return the messages, those to `peers` joined to the one before them to the same peer.

    limit: bytes of the longest that are joined, all of one dtype.
    """
    joined: list[Message] = []
    last: dict[int, int] = {}
    for message in messages:
        before = joined[last[message.peer]] if message.peer in last else None
        if (
            before is not None
            and before.dtype == message.dtype
            and before.nbytes + message.nbytes <= limit
        ):
            names, views = before.names + message.names, before.views + message.views
            joined[last[message.peer]] = Message(message.peer, names, views, message.dtype)
            continue
        if message.peer in peers:
            last[message.peer] = len(joined)
        joined.append(message)
    return joined


def _legs(
    outbox: Outbox, message: Message, read: Read, flight: _Flight
) -> Iterator[tuple[bytes, Callable[[], None]]]:
    """Yield the descriptor of each leg, once one more may be under way, and what follows.

    That is called once the leg has landed.
    """
    lies = len(message.views) == 1 and read is as_it_is and message.views[0].dtype == message.dtype
    descriptor = outbox.where_it_lies(message.views[0]) if lies else None
    if descriptor is not None:
        flight.make_way()
        yield descriptor, _nothing
        return
    views = _read(message, read)
    for packed in outbox.pack(views, message.dtype, message.nbytes, flight.land):
        flight.make_way()
        yield packed, outbox.landed


def _nothing() -> None:
    """Leave memory that was not lent as it is."""


def _inboxes(group: ProcessGroup, messages: Sequence[Message]) -> dict[int, Inbox]:
    """Return, for the senders whose memory this rank has opened, what takes their numbers."""
    coming: dict[int, list[Message]] = {}
    openers = lanes_of(group).openers
    for message in messages:
        if message.peer in openers:
            coming.setdefault(message.peer, []).append(message)
    found: dict[int, Inbox] = {}
    for peer, listed in coming.items():
        places = ((view, message.dtype) for message in listed for view in message.views)
        nbytes = sum(message.nbytes for message in listed)
        with _WithPeer(peer):
            found[peer] = Inbox(group, peer, openers[peer], places, nbytes)
    return found


@dataclass(frozen=True, slots=True)
class _Turn:
    """Waits until an inbox has taken `nbytes`."""

    inbox: Inbox
    nbytes: int

    def wait(self) -> None:
        """Wait for them."""
        self.inbox.reach(self.nbytes)


def _read(message: Message, read: Read) -> Iterator[torch.Tensor]:
    """Yield what is sent of each view, one after the other."""
    for name, view in zip(message.names, message.views, strict=True):
        yield read(name, view)


def relay(group: ProcessGroup, steps: Sequence[Message | PassedOn], device: torch.device) -> None:
    """Receive the messages into their views, and pass some of them on, in the order of `steps`.

    What is passed on is sent from the views, once it is there. All of it passes through the group:
    where servers relay no two ranks are asked whether they are on one host. PeerLost: as in send
    and receive.
    """
    arriving = [step for step in steps if isinstance(step, Message)]
    leaving = [step.message for step in steps if isinstance(step, PassedOn)]
    # each has buffers of its own: none waits for one that only a later message would free
    receipts, sends = _tagged(arriving), _tagged(leaving)
    with (
        torch.no_grad(),
        _Flight(group, arriving, device) as inward,
        _Flight(group, leaving, device) as outward,
    ):
        for step in steps:
            if isinstance(step, Message):
                message, tag = next(receipts)
                slot = inward.slot(message)
                with _WithPeer(message.peer):
                    work = post_recv(group, slot.wire, message.peer, tag)
                inward.add(message.peer, work, partial(inward.unpack, slot))
                continue
            while inward.landed <= step.number:
                inward.land()
            message, tag = next(sends)
            slot = outward.slot(message)
            if slot.buffer is not None:
                for place, view in zip(slot.places(), message.views, strict=True):
                    place.copy_(view)
            with _WithPeer(message.peer):
                work = post_send(group, slot.wire, message.peer, tag)
            outward.add(message.peer, work, partial(outward.free, slot))
        inward.end()
        outward.end()


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
    """Holds what is on its way, in order, and the buffers of packed messages.

    messages: those that pass through the group. packs_all: none travels from where it lies.
    most: that are on their way at once. landed: how many are there, or have left.
    """

    def __init__(
        self,
        group: ProcessGroup,
        messages: Sequence[Message],
        device: torch.device,
        *,
        packs_all: bool = False,
        most: int = IN_FLIGHT,
    ) -> None:
        self._group, self._device = group, device
        self._packs_all, self._most = packs_all, most
        self._under_way: deque[tuple[int, Any, Callable[[], None]]] = deque()
        self.landed = 0
        packed = [message.nbytes for message in messages if not self._lies_ready(message)]
        self._free = deque(
            torch.empty(max(packed), dtype=torch.uint8, device=device)
            for _ in range(min(BUFFERS, len(packed)))
        )

    def __enter__(self) -> _Flight:
        return self

    def __exit__(self, *failure: object) -> None:
        """Forget what is on its way: it refers to this and to the group, which must end at once."""
        self._under_way.clear()

    def make_way(self) -> None:
        """Wait until one more may be on its way."""
        while len(self._under_way) >= self._most:
            self.land()

    def slot(self, message: Message) -> _Slot:
        """Return a slot, once one is free and one more message may be on its way."""
        self.make_way()
        if self._lies_ready(message):
            return _Slot(message, message.views[0].view(-1), None)
        while not self._free:
            self.land()
        buffer = self._free.popleft()
        return _Slot(message, buffer[: message.nbytes].view(message.dtype), buffer)

    def add(self, peer: int, work: Any, landed: Callable[[], None]) -> None:
        """Add what has been started. landed: called once it has arrived."""
        self._under_way.append((peer, work, landed))

    def land(self) -> None:
        """Wait for the first that is on its way."""
        peer, work, landed = self._under_way.popleft()
        with _WithPeer(peer):
            await_work(self._group, work, self._device)
        self.landed += 1
        landed()

    def end(self) -> None:
        """Wait for all that are on their way."""
        while self._under_way:
            self.land()

    def free(self, slot: _Slot) -> None:
        """Use the buffer of a message again that has left."""
        if slot.buffer is not None:
            self._free.append(slot.buffer)

    def unpack(self, slot: _Slot) -> None:
        """Copy a message that has come to its views, and use its buffer again."""
        if slot.buffer is not None:
            for place, view in zip(slot.places(), slot.message.views, strict=True):
                view.copy_(place)
            self._free.append(slot.buffer)

    def _lies_ready(self, message: Message) -> bool:
        if self._packs_all or len(message.views) != 1:
            return False
        (view,) = message.views
        is_there = view.dtype == message.dtype and view.device.type == self._device.type
        return is_there and view.is_contiguous()


class _WithPeer:
    """Makes a failure of the group inside one of `peer`, which keeps no group alive once handled.

    Not a generator with contextlib.contextmanager: one that raises another error than came in is in
    a cycle with that error from Python 3.12 on, and so are all frames between. They hold the group,
    and a rank that leaves it would stay connected until Python's garbage collector runs.
    """

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerLost(self._peer, said_plainly(error)) from None


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
