"""Sends and receives messages of weights between two ranks of a group, point to point.

A message is the numbers of some views, end to end. Both ends pass through their messages in their
order with two buffers: while one is on its way, the next is packed, or the last one unpacked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Message:
    """Describes one message. peer: the other end's rank in the group. views: live memory.

    names: of the views' tensors, for whoever changes them on the way.
    """

    peer: int
    names: tuple[str, ...]
    views: tuple[torch.Tensor, ...]

    @property
    def elements(self) -> int:
        """Returns the numbers that it holds."""
        return sum(view.numel() for view in self.views)


Read = Callable[[str, torch.Tensor], torch.Tensor]


def _as_it_is(name: str, view: torch.Tensor) -> torch.Tensor:
    return view


def send(
    group: ProcessGroup,
    messages: Sequence[Message],
    dtype: torch.dtype,
    device: torch.device,
    read: Read = _as_it_is,
) -> None:
    """Send every message, cast to `dtype`; returns when the last one has left.

    device: where the group wants its buffers. read: what to send in place of a view.
    RuntimeError: the peer did not take a message within the group's timeout.
    """
    buffers = _buffers(messages, dtype, device)
    works: list[Any] = []
    with torch.no_grad():
        for (message, tag), buffer in zip(_tagged(messages), _in_turn(buffers), strict=False):
            if len(works) >= BUFFERS:
                works.pop(0).wait()
            part, offset = buffer[: message.elements], 0
            for name, view in zip(message.names, message.views, strict=True):
                held = read(name, view)
                part[offset : offset + view.numel()].view(view.shape).copy_(held)
                offset += view.numel()
            works.append(group.send([part], message.peer, tag))
    for work in works:
        work.wait()


def receive(
    group: ProcessGroup, messages: Sequence[Message], dtype: torch.dtype, device: torch.device
) -> None:
    """Receive every message of numbers of `dtype` into its views.

    RuntimeError: the peer did not send a message within the group's timeout.
    """
    buffers = _buffers(messages, dtype, device)
    pending: list[tuple[Any, Message, torch.Tensor]] = []
    with torch.no_grad():
        for (message, tag), buffer in zip(_tagged(messages), _in_turn(buffers), strict=False):
            if len(pending) >= BUFFERS:
                _unpack(*pending.pop(0))
            part = buffer[: message.elements]
            pending.append((group.recv([part], message.peer, tag), message, part))
        for arrived in pending:
            _unpack(*arrived)


def _unpack(work: Any, message: Message, part: torch.Tensor) -> None:
    work.wait()
    offset = 0
    for view in message.views:
        view.copy_(part[offset : offset + view.numel()].view(view.shape))
        offset += view.numel()


def _buffers(
    messages: Sequence[Message], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    largest = max((message.elements for message in messages), default=0)
    count = min(BUFFERS, len(messages))
    return [torch.empty(largest, dtype=dtype, device=device) for _ in range(count)]


def _in_turn(buffers: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    while buffers:
        yield from buffers


def _tagged(messages: Sequence[Message]) -> Iterator[tuple[Message, int]]:
    """Yield each message with its number among those of the same two ranks."""
    numbers: Counter[int] = Counter()
    for message in messages:
        yield message, numbers[message.peer]
        numbers[message.peer] += 1
