"""Listening on one address: torch's stores listen on every interface unless told otherwise."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def bound_store(
    host: str, port: int, world_size: int, timeout: timedelta, *, wait: bool = True
) -> TCPStore:
    """The master's side of a store that listens on host:port alone.

    wait: until all `world_size` members are there. OSError: the address is taken or not ours.
    """
    # torch takes a socket that is bound already and listens on it
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        return TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=wait,
            master_listen_fd=listener.detach(),
        )


def interface_of(host: str) -> str | None:
    """The network interface that has this address; None: no interface of this machine has it."""
    try:
        wanted = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(entry.address.partition("%")[0]) in wanted:
                return name
    return None


def keep_groups_on(host: str) -> None:
    """Make process groups of this process listen on `host`'s interface alone.

    Otherwise gloo takes the address that the machine's name resolves to. What the environment says
    already stays, and so does a world of several machines, whose ranks must reach each other.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        return
    name = interface_of(host)
    if name is not None:
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, name)
