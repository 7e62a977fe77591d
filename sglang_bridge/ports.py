"""Finds ports for servers that are about to start.

A port given out here is free now and bound a moment later by another process. The kernel picks the
local ends of outgoing connections from its ephemeral range (from 32768 on Linux), so a port from
there can be gone by then; below it only listeners take ports, and those are asked for at random.
"""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 32_767
ATTEMPTS = 200

_random = random.SystemRandom()  # processes that start together must not ask for the same ports


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a TCP port of `host` that is free now. Raises OSError when none was found."""
    for _ in range(ATTEMPTS):
        port = _random.randint(FIRST, LAST)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port of {ATTEMPTS} tried in {FIRST}..{LAST} on {host}")
