"""Hands out ports of a job's own range, so that two jobs on one node do not meet.

Invariant: no port is handed out twice, and none that something listened on when it was asked for.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from itertools import chain

from megatron_opd.launch.launcher import CannotPlace

FIRST, END, SPAN = 20_000, 32_000, 100
"""The ports, below those that Linux gives to outgoing connections, and how many a job has before it
uses those of the next one."""
CONNECT_S = 0.5


def is_taken(host: str, port: int) -> bool:
    """Return whether something listens there. What does not answer counts as free."""
    try:
        with socket.create_connection((host, port), CONNECT_S):
            return True
    except OSError:
        return False


class JobPorts:
    """Gives free ports to the processes of one job."""

    def __init__(self, job: int, taken: Callable[[str, int], bool] = is_taken) -> None:
        start = FIRST + job * SPAN % (END - FIRST)
        self._left: Iterator[int] = chain(range(start, END), range(FIRST, start))
        self._taken = taken

    def take(self, host: str) -> int:
        """Return a port that nothing uses on `host`, and none of the job's processes elsewhere.

        CannotPlace: there is none.
        """
        for port in self._left:
            if not self._taken(host, port):
                return port
        raise CannotPlace(f"something listens on every port of {FIRST}..{END - 1} of {host}")
