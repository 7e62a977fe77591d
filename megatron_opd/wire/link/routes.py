"""Decides on which connection a peer is spoken to, and which of its processes is heard.

Invariant: of each name one process is heard, the one that came last, on its newest connection.
Whose process was replaced or did what it must not is told so, and never heard again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

FORMER_KEPT = 64
"""Replaced processes of a name that are remembered."""


class Greeting(Enum):
    """Says what a greeting is."""

    NEW = "new"
    """The newest connection of its name."""
    OLD = "old"
    """A connection that was already followed by another."""
    FORMER = "former"
    """A process that was replaced."""


class Routes:
    """Holds by name the process, its connection's number and ZeroMQ's route to it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._routes: dict[str, bytes] = {}
        self._newest: dict[str, tuple[bytes, int]] = {}
        self._former = {name: deque[bytes](maxlen=FORMER_KEPT) for name in names}

    def is_on(self, name: str, route: bytes) -> bool:
        """Return whether `route` is the one on which `name` is spoken to."""
        return self._routes.get(name) == route

    def greet(self, name: str, process: bytes, number: int) -> Greeting:
        """Return what a greeting is, and change nothing."""
        if process in self._former[name]:
            return Greeting.FORMER
        known, last = self._newest.get(name, (b"", 0))
        return Greeting.OLD if process == known and number <= last else Greeting.NEW

    def put(self, name: str, process: bytes, number: int, route: bytes) -> bytes | None:
        """Speak to `name` on this route; return that of a process that is replaced with it."""
        known, _ = self._newest.get(name, (process, 0))
        former = self._routes.get(name)
        self._newest[name], self._routes[name] = (process, number), route
        if process == known:
            return None
        self._former[name].append(known)
        return former

    def end(self, name: str, route: bytes) -> bool:
        """Forget a route that is of no use; return whether it was in use."""
        if self._routes.get(name) != route:
            return False
        del self._routes[name]
        return True

    def banish(self, name: str, process: bytes) -> None:
        """Refuse everything more of a process."""
        self._former[name].append(process)
        self._routes.pop(name, None)
