"""Models how a teacher's server scores: in passes, each of whatever waits when it begins.

Who comes during a pass waits for its end, first come first served; a pass's requests are complete
together, at its end.
"""

from __future__ import annotations

import math
from collections import deque

from megatron_opd.sim.costs import ScoreCost


class ScoreJob:
    """Holds one request. tokens: of prompt and response."""

    __slots__ = ("ended", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.ended = False  # complete, cancelled, or lost


class Scorer:
    """Scores. All times are given, never asked for; they must not fall.

    Call `advance` at `next_s`, and before anything else is asked for at a later time.
    """

    def __init__(self, cost: ScoreCost) -> None:
        self._cost = cost
        self.next_s = math.inf
        """When something happens next that `advance` has to see."""
        self._waiting: deque[ScoreJob] = deque()
        self._working: list[ScoreJob] = []

    @property
    def busy(self) -> bool:
        """Returns whether it works."""
        return bool(self._working)

    def add(self, job: ScoreJob, now_s: float) -> None:
        """Take a request."""
        self._waiting.append(job)
        if not self._working:
            self._begin(now_s)

    def cancel(self, job: ScoreJob, now_s: float) -> None:
        """Forget a request; the pass that it is part of goes on."""
        job.ended = True

    def advance(self, now_s: float) -> list[ScoreJob]:
        """Do all that happens until `now_s`; return what is complete."""
        complete: list[ScoreJob] = []
        while self.next_s <= now_s:
            for job in self._working:
                if not job.ended:
                    job.ended = True
                    complete.append(job)
            self._begin(self.next_s)
        return complete

    def lost(self) -> list[ScoreJob]:
        """Return all requests that are not complete, as the server has died; use it no more."""
        return [job for job in (*self._waiting, *self._working) if not job.ended]

    def _begin(self, now_s: float) -> None:
        """Begin a pass of those that wait, as many as it may hold and one at least."""
        cost, tokens, chosen = self._cost, 0, list[ScoreJob]()
        while self._waiting and len(chosen) < cost.max_running:
            job = self._waiting[0]
            if not job.ended:
                if chosen and tokens + job.tokens > cost.pass_tokens:
                    break
                chosen.append(job)
                tokens += job.tokens
            self._waiting.popleft()
        self._working = chosen
        seconds = cost.pass_s + len(chosen) * cost.request_s + tokens * cost.token_s
        self.next_s = now_s + seconds if chosen else math.inf
