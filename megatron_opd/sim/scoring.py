"""Models how a teacher's server scores: its requests share it equally.

Invariant: exact. With n requests at work each gets 1/n of the server, so that one which needs w
seconds alone is complete when each has got w more; a heap of these moments makes coming and going
O(log n).
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from itertools import count

from megatron_opd.sim.costs import ScoreCost


class ScoreJob:
    """Holds one request. seconds: that the server needs for it alone."""

    __slots__ = ("ended", "running", "seconds")

    def __init__(self, cost: ScoreCost, tokens: int) -> None:
        self.seconds = cost.request_s + tokens * cost.token_s
        self.running = self.ended = False


class Scorer:
    """Scores. All times are given, never asked for; they must not fall.

    Call `advance` at `next_s`, and before anything else is asked for at a later time.
    """

    def __init__(self, cost: ScoreCost) -> None:
        self._cost = cost
        self.next_s = math.inf
        """When something happens next that `advance` has to see."""
        self._numbers = count()
        self._waiting: deque[ScoreJob] = deque()
        self._heap: list[tuple[float, int, ScoreJob]] = []
        self._given_s = 0.0  # that each request at work was given until `_since_s`
        self._since_s = 0.0
        self.running = 0
        """Requests that are worked on."""

    @property
    def busy(self) -> bool:
        """Returns whether it works."""
        return self.running > 0

    def add(self, job: ScoreJob, now_s: float) -> None:
        """Take a request."""
        self._give(now_s)
        self._waiting.append(job)
        self._look()

    def cancel(self, job: ScoreJob, now_s: float) -> None:
        """Forget a request."""
        if job.ended:
            return
        self._give(now_s)
        job.ended = True
        self.running -= job.running
        self._look()

    def advance(self, now_s: float) -> list[ScoreJob]:
        """Do all that happens until `now_s`; return what is complete."""
        complete: list[ScoreJob] = []
        while self.next_s <= now_s:
            self._since_s = self.next_s
            self._given_s = self._heap[0][0]
            while self._heap and self._heap[0][0] <= self._given_s:
                _, _, job = heappop(self._heap)
                if not job.ended:
                    job.ended = True
                    self.running -= 1
                    complete.append(job)
            self._look()
        return complete

    def lost(self) -> list[ScoreJob]:
        """Return all requests that are not complete, as the server has died; use it no more."""
        working = [job for _, _, job in self._heap]
        return [job for job in (*self._waiting, *working) if not job.ended]

    def _give(self, now_s: float) -> None:
        if self.running:
            self._given_s += (now_s - self._since_s) / self.running
        self._since_s = now_s

    def _look(self) -> None:
        while self._waiting and self.running < self._cost.max_running:
            job = self._waiting.popleft()
            if not job.ended:
                job.running = True
                self.running += 1
                heappush(self._heap, (self._given_s + job.seconds, next(self._numbers), job))
        while self._heap and self._heap[0][2].ended:
            heappop(self._heap)
        self.next_s = math.inf
        if self._heap:
            left_s = max(0.0, self._heap[0][0] - self._given_s)
            self.next_s = self._since_s + left_s * self.running
