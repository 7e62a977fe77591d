"""Estimates round-trip time and the other clock's offset from heartbeats (as NTP does)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT = 8
"""Heartbeats that are looked at: the quickest of them tells the offset best."""


@dataclass(frozen=True, slots=True)
class _Look:
    rtt_s: float
    offset_s: float


class ClockEstimate:
    """Takes answers to heartbeats. offset_s: theirs less ours; wrong by rtt_s/2 at most."""

    def __init__(self) -> None:
        self._looks = deque[_Look](maxlen=KEPT)

    @property
    def rtt_s(self) -> float | None:
        """Returns the last round-trip time, None before there is one."""
        return self._looks[-1].rtt_s if self._looks else None

    @property
    def offset_s(self) -> float | None:
        """Returns the other clock's time less ours, None before there is an answer."""
        return min(self._looks, key=lambda look: look.rtt_s).offset_s if self._looks else None

    def add(self, asked_s: float, received_s: float, sent_s: float, answered_s: float) -> None:
        """Take an answer: Unix times of asking and of its answer here, between them those there.

        Times that cannot be (a clock was set meanwhile, or the other end lies) are passed over.
        """
        there_s = sent_s - received_s
        rtt_s = (answered_s - asked_s) - there_s
        if there_s >= 0 and rtt_s >= 0:
            offset_s = ((received_s - asked_s) + (sent_s - answered_s)) / 2
            self._looks.append(_Look(rtt_s, offset_s))
