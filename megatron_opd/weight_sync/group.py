"""Joins process groups of learner and servers, as SGLang's `init_custom_process_group` forms them.

They are no part of the learner's own world: their ranks are those of the servers too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from megatron_opd.weight_sync.store import bound_store
from sglang_bridge.weights.posting import meet


def listen(host: str, port: int, size: int, timeout_s: float) -> TCPStore:
    """Open the store of a group of `size` ranks on host:port (0: any free one), without waiting.

    OSError: the address is taken or not ours.
    """
    return bound_store(host, port, size, timedelta(seconds=timeout_s), wait=False)


def visit(host: str, port: int, size: int, timeout_s: float) -> TCPStore:
    """Connect to another rank's store. torch.distributed.DistError: nobody listens in time."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, size, is_master=False, timeout=timeout)


def join(
    store: Store, rank: int, size: int, name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Form the group `name`; returns when all have joined.

    torch.distributed.DistError: a rank stayed away for the timeout.
    """
    # Explicit: under torchrun a tcp:// rendezvous would join torchrun's own store instead.
    group: Any = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]
        timeout=timedelta(seconds=timeout_s),
    )[0]
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    meet(group, torch.device(buffer_device_type(backend)))
    return group


def buffer_device_type(backend: str) -> str:
    """Return where a group of this backend wants its buffers: "cpu" or "cuda"."""
    return "cpu" if backend == "gloo" else "cuda"
