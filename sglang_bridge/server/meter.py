"""Measures forward passes: what each held, and the seconds until the next one begins.

So the time between two passes (sampling, what a reply takes, the next batch) is the former's. A
pass after which the scheduler idles or is paused ends there.
"""

from __future__ import annotations

import time
from typing import Any

from sglang_bridge.server.compat import batches
from sglang_bridge.work import PassSums, ServerWork


class PassMeter:
    """Adds up the passes of this process. Clocks: of seconds, and of CPU seconds."""

    def __init__(self, busy: Any = time.monotonic, cpu: Any = time.process_time) -> None:
        self._busy, self._cpu = busy, cpu
        self._sums = {"decode": PassSums(), "prefill": PassSums()}
        self._open: tuple[str, int, int, float, float] | None = None

    def begin(self, batch: Any) -> None:
        """Begin a pass; whatever came before it is over."""
        self.end()
        found = batches.pass_of(batch)
        if found is not None:
            self._open = (*found, self._busy(), self._cpu())

    def end(self) -> None:
        """Count the open pass, if there is one."""
        if self._open is None:
            return
        kind, requests, tokens, busy_s, cpu_s = self._open
        self._open = None
        seconds = self._busy() - busy_s, self._cpu() - cpu_s
        self._sums[kind] = self._sums[kind].plus(requests, tokens, *seconds)

    def work(self) -> ServerWork:
        """Return what was counted; a pass that is open is not part of it."""
        return ServerWork(**self._sums)
