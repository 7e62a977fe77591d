"""Counts who is refused at one door, and says so, but not so often that a stranger fills a log."""

from __future__ import annotations

import logging
import time

LOG_EVERY_S = 1.0


class Refusals:
    """Counts refusals and logs them at most once in LOG_EVERY_S. where: the door, for the log."""

    def __init__(self, logger: logging.Logger, where: str) -> None:
        self.count = 0
        self._logger, self._where = logger, where
        self._said_s = -LOG_EVERY_S

    def add(self, reason: str) -> None:
        """Count one more for `reason`, which must be fit for a log."""
        self.count += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= LOG_EVERY_S:
            self._said_s = now_s
            self._logger.warning("refused %s: %s (%d so far)", self._where, reason, self.count)
