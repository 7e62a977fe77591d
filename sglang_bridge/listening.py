"""Listens on one address alone. Torch-free.

torch's stores listen on every interface unless they are given a socket that is bound already; gloo
and NCCL listen on the address that the machine's name resolves to unless they are given an
interface.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping

import psutil

BACKLOG = 2048  # as torch's own store
EVERY_ADDRESS = ("0.0.0.0", "::")
"""Names of all addresses of a machine, where it listens; nobody can connect to them by these."""


def bound_socket(host: str, port: int) -> socket.socket:
    """Opens a TCP socket that listens on host:port (0: a free port).

    OSError: taken, or not ours.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def interface_of(host: str) -> str | None:
    """Returns the network interface that has this address; None: none of this machine has it."""
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


def keep_groups_on(
    host: str, environment: MutableMapping[str, str], interface: str | None = None
) -> None:
    """Sets the interface of gloo and NCCL: `interface`, or that of `host`.

    Without `interface`, what the environment already says stays. ValueError: this machine has none
    of that name.
    """
    if interface is not None:
        require_interface(interface)
        environment.update(_named(interface))
        return
    name = interface_of(host)
    if name is not None:
        for variable, value in _named(name).items():
            environment.setdefault(variable, value)


def require_interface(name: str) -> None:
    """Raises ValueError, in one line, if this machine has no network interface of that name."""
    there = sorted(psutil.net_if_addrs())
    if name not in there:
        raise ValueError(
            f"cluster.interface must be one of every machine, got {name!r}, and this one has "
            f"{', '.join(there)}"
        )


def _named(interface: str) -> dict[str, str]:
    # =: this one, not its namesakes
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
