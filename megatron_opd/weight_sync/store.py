"""Listens on one address, where torch's stores otherwise listen on every interface."""

from __future__ import annotations

import os
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from sglang_bridge import listening


def bound_store(
    host: str, port: int, world_size: int, timeout: timedelta, *, wait: bool = True
) -> TCPStore:
    """Open the master's side of a store that listens on host:port alone.

    wait: until all `world_size` members are there. OSError: the address is taken or not ours.
    """
    with listening.bound_socket(host, port) as listener:
        return TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=wait,
            master_listen_fd=listener.detach(),  # the store closes it
        )


def keep_groups_on(host: str, interface: str | None = None) -> None:
    """Make process groups of this process listen only on `interface`, or on that of `host`.

    Without `interface` a world of several machines, whose ranks must reach each other, is left as
    it is. ValueError: this machine has none of that name.
    """
    if interface is not None or int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        listening.keep_groups_on(host, os.environ, interface)
