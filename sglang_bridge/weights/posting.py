"""Posts point-to-point messages in a group of ranks, and waits for what was posted.

gloo takes each message as it is, and a wait for a lost peer ends with an error at the group's
timeout. NCCL differs in both. A send or receive outside a batch makes a communicator of two for
every pair of ranks, each with GPU memory of its own; a batch of one uses the group's, which must
have been formed by all ranks before (`meet`). And its wait neither blocks the host nor raises: a
lost peer is first noticed by the watchdog, which ends the process. With a limit the wait blocks,
raises, and aborts the communicator.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_bridge.weights.lanes import forget_lanes

SOONER = 0.8
"""The part of a group's timeout that a wait lasts: an error has to come before the watchdog."""


def is_nccl(group: Any) -> bool:
    """Return whether messages of `group` go through NCCL."""
    return group.name() == "nccl"


def post_send(group: Any, wire: torch.Tensor, peer: int, tag: int) -> Any:
    """Begin to send `wire` to a rank; returns the work to wait for."""
    return _posted(group, group.send, wire, peer, tag)


def post_recv(group: Any, wire: torch.Tensor, peer: int, tag: int) -> Any:
    """Begin to receive into `wire` from a rank; returns the work to wait for."""
    return _posted(group, group.recv, wire, peer, tag)


def _posted(group: Any, way: Any, wire: torch.Tensor, peer: int, tag: int) -> Any:
    if not is_nccl(group):
        return way([wire], peer, tag)
    group._start_coalescing(wire.device)
    try:
        way([wire], peer, tag)
    finally:
        work = group._end_coalescing(wire.device)
    return work


def meet(group: Any, device: torch.device) -> None:
    """Form NCCL's communicator of the group. Collective over it, and nothing without NCCL.

    Batches of two ranks would form it too, and wait for the ranks that have no part in them.
    """
    if is_nccl(group):
        await_work(group, group.allreduce([torch.zeros(1, device=device)]), device)


def await_work(group: Any, work: Any, device: torch.device) -> None:
    """Wait until what was posted is done. RuntimeError: it was not, in time.

    device: of its tensors.
    """
    if isinstance(work, dist.Work) and is_nccl(group):
        work.wait(limit_of(group, device))
    else:
        work.wait()


def limit_of(group: Any, device: torch.device) -> timedelta:
    """Return how long a wait of the group may last."""
    return group._get_backend(device).options._timeout * SOONER


def leave(group: dist.ProcessGroup) -> None:
    """Leave a group, also one that has failed; its other ranks notice at once."""
    forget_lanes(group)
    if is_nccl(group):
        group.abort()  # else it would wait for messages that no one takes
    dist.destroy_process_group(group)
