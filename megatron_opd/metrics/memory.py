"""Samples the peak memory of this process and all its descendants."""

from __future__ import annotations

import contextlib

import psutil

from megatron_opd.metrics.types import Max


class PeakMemory:
    """Keeps the largest sum of resident set sizes seen, in bytes.

    Pages that processes share are counted once per process, so this is an upper bound.
    """

    def __init__(self) -> None:
        self._peak = Max()
        self._root = psutil.Process()

    def sample(self) -> int:
        """Measure now (a few milliseconds); returns the current sum in bytes."""
        total = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            # a child may end between being listed and being measured
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_info().rss
        self._peak.add(total)
        return total

    def add(self, num_bytes: int) -> None:
        """Count a sample taken elsewhere."""
        self._peak.add(num_bytes)

    @property
    def peak_bytes(self) -> int:
        """Returns the largest sample so far; measures once when there is none."""
        if self._peak.value is None:
            self.sample()
        return int(self._peak.value or 0)
