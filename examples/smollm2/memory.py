"""Peak memory of this process and its descendants: pages that they share are counted once."""

from __future__ import annotations

import contextlib
import threading

import psutil


class PeakMemory:
    """Samples the sum of proportional set sizes (PSS) in a thread while it is entered."""

    def __init__(self, every_s: float = 2.0) -> None:
        self.peak_bytes = 0
        self._every_s, self._done = every_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self.peak_bytes = max(self.peak_bytes, total_pss())


def total_pss() -> int:
    """Return the bytes in use now."""
    root, total = psutil.Process(), 0
    for process in [root, *root.children(recursive=True)]:
        # a child may end between being listed and being measured
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total
