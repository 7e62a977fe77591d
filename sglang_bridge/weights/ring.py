"""Gives out pieces of one block of memory, which come back in that order."""

from __future__ import annotations

from collections import deque

ALIGNED = 64
"""Bytes: every piece begins at a multiple of it, as numbers of any dtype may."""


class Ring:
    """Gives out pieces of `size` bytes, a multiple of ALIGNED."""

    def __init__(self, size: int) -> None:
        assert size > 0
        assert size % ALIGNED == 0, size
        self._size = size
        # counted on and on; their places are the remainders by the size
        self._head = self._tail = 0
        self._ends: deque[int] = deque()

    def take(self, nbytes: int) -> int | None:
        """Return where a piece of `nbytes` begins; None: give one back first."""
        needed = -(-nbytes // ALIGNED) * ALIGNED
        assert 0 < needed <= self._size, nbytes
        if not self._ends:
            self._head = self._tail = 0
        at = self._head % self._size
        start = self._head if at + needed <= self._size else self._head - at + self._size
        if start + needed - self._tail > self._size:
            return None
        self._head = start + needed
        self._ends.append(self._head)
        return start % self._size

    def give_back(self) -> None:
        """Take back the piece that was lent first."""
        self._tail = self._ends.popleft()
