"""Which addresses a tree of processes listens on, for tests that no door is left open."""

import psutil


def listening(pid: int) -> list[tuple[str, int, str]]:
    """(ip, port, process name) of every TCP listener, and every unconnected UDP socket, below pid.

    The process itself and all its descendants, sorted. ip is "0.0.0.0" or "::" for a socket on
    every interface. A process that ends while it is looked at has no sockets.
    """
    root = psutil.Process(pid)
    found = set()
    for process in [root, *root.children(recursive=True)]:
        try:
            name = process.name()
            for socket in process.net_connections("inet"):
                if not socket.raddr and socket.laddr and socket.status in ("LISTEN", "NONE"):
                    found.add((socket.laddr.ip, socket.laddr.port, name))
        except psutil.NoSuchProcess:
            continue
    return sorted(found)


def open_to_others(pid: int, host: str = "127.0.0.1") -> list[tuple[str, int, str]]:
    """The sockets of `listening` that are bound to anything but `host`."""
    return [socket for socket in listening(pid) if socket[0] != host]
