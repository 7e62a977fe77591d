"""Models how a student server samples: steps of decoding, prefill, a KV cache of limited size.

Invariant: times are those of a server that is simulated step by step (tests hold it to one), up to
rounding; nothing is done for a single token. Between two changes of who is running, step j of the
n requests takes a + j b seconds with b = n step_cached_token_s, as the cache grows by n tokens a
step; so m steps take m a + b m (m - 1) / 2, and the step during which something arrives is the root
of that quadratic. Who arrives waits for the end of the step, then is let in, first come first
served, while there is room for its prompt and its whole response. Those let in together are
prefilled together, while no other token is sampled; the prefill gives each its first token, as on a
real server. One that idles begins at once with whoever comes. What a turn of a trajectory leaves in
the cache its next turn finds there, unless others needed the room (the oldest leaves first) or the
cache was flushed. Adding, ending and cancelling take O(log n).
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from megatron_opd.sim.costs import EngineCost

Phase = Literal["idle", "prefill", "decode", "paused"]


class EngineJob:
    """Holds one request. tokens: of the response it will have. done: that it has.

    trajectory: whose turn it is; None: nothing follows it. spans: [version, first token] of every
    version that sampled some of it. cached: tokens of its prompt that were in the cache when it was
    let in first. found: the same, when it was let in last.
    """

    __slots__ = (
        *("cached", "done", "ended", "found", "number", "prompt_tokens", "running", "spans"),
        *("stop", "tokens", "trajectory"),
    )

    def __init__(self, prompt_tokens: int, tokens: int, trajectory: int | None = None) -> None:
        self.prompt_tokens, self.tokens, self.trajectory = prompt_tokens, tokens, trajectory
        self.done = self.cached = self.found = 0
        self.spans: list[tuple[int, int]] = []
        self.number = -1
        self.stop = -1  # step at whose end it is complete
        self.running = False  # is being prefilled or decoded
        self.ended = False  # complete, cancelled, or lost

    @property
    def room(self) -> int:
        """Returns the tokens that it takes of the KV cache in the end."""
        return self.prompt_tokens + self.tokens


class Engine:
    """Samples. All times are given, never asked for; they must not fall.

    Call `advance` at `next_s`, and before anything else is asked for at a later time.
    """

    def __init__(self, cost: EngineCost, version: int = 0) -> None:
        self._cost = cost
        self.version = version
        self.phase: Phase = "idle"
        self.next_s = math.inf
        """When something happens next that `advance` has to see."""
        self._numbers = count()
        self._waiting: deque[EngineJob] = deque()
        self._prefilling: list[EngineJob] = []
        self._decoding: list[tuple[int, int, EngineJob]] = []  # a heap, by their last step
        self._cancelled: list[EngineJob] = []
        self._pausing = False
        self._num = 0  # requests that are decoded
        self._cached = 0  # tokens in the cache of those, at the last change
        self._room = 0  # tokens that those, and the prefilled, take in the end
        self._kept: dict[int, int] = {}  # tokens in the cache by trajectory, the oldest first
        self._num_kept = 0  # their sum
        self._step = 0  # steps that were made until the last change
        self._since_s = 0.0  # when the last change was
        self._first_s = self._growth_s = 0.0  # a and b of the module's formula

    @property
    def waiting(self) -> int:
        """Returns how many requests wait to be let in, those that were cancelled included."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Returns whether it works."""
        return self.phase in ("prefill", "decode")

    @property
    def running(self) -> int:
        """Returns how many requests are prefilled or decoded."""
        return self._num + len(self._prefilling)

    def add(self, job: EngineJob, now_s: float) -> None:
        """Take a request."""
        job.number = next(self._numbers)
        self._waiting.append(job)
        if self.phase == "idle":
            self._change(now_s)
        else:
            self._look_at_queue(now_s)

    def cancel(self, job: EngineJob, now_s: float) -> None:
        """Forget a request, at the end of the step if it is being decoded."""
        if job.ended:
            return
        job.ended = True
        if not job.running:
            self._look_at_queue(now_s)
            return
        self._cancelled.append(job)
        if self.phase == "decode":
            self._look_at_end_of_step(now_s)

    def pause(self, now_s: float) -> None:
        """Stop at the end of the step or prefill; what is running goes back into the queue."""
        if self.phase == "paused":
            return
        self._pausing = True
        if self.phase == "idle":
            self._change(now_s)
        elif self.phase == "decode":
            self._look_at_end_of_step(now_s)

    def resume(self, now_s: float) -> None:
        """Continue; the cache of what was running is computed anew, which gives each a token."""
        self._pausing = False
        if self.phase == "paused":
            self._change(now_s)

    def flush(self) -> None:
        """Forget what ended turns left in the cache."""
        self._kept.clear()
        self._num_kept = 0

    def lost(self) -> list[EngineJob]:
        """Return all requests that are not complete, as the server has died; use it no more."""
        decoding = [job for _, _, job in self._decoding]
        return [j for j in (*self._waiting, *self._prefilling, *decoding) if not j.ended]

    def advance(self, now_s: float) -> list[EngineJob]:
        """Do all that happens until `now_s`; return what is complete."""
        complete: list[EngineJob] = []
        while self.next_s <= now_s:
            at_s = self.next_s
            if self.phase == "prefill":
                self._end_prefill(complete)
            else:
                self._end_step(at_s, complete)
            self._change(at_s)
        return complete

    # ------------------------------------------------------------ steps

    def _time_of(self, steps: int) -> float:
        """Return when so many steps after the last change are done."""
        grown_s = self._growth_s * (steps * (steps - 1) // 2)
        return self._since_s + steps * self._first_s + grown_s

    def _steps_until(self, now_s: float) -> int:
        """Return how many steps after the last change are done once the present one is."""
        passed_s, half_s = now_s - self._since_s, self._growth_s / 2
        linear_s = self._first_s - half_s
        # the root of half x^2 + linear x = passed, in the form that is also right for half = 0
        root = math.sqrt(max(0.0, linear_s * linear_s + 4 * half_s * passed_s))
        steps = max(0, math.ceil(2 * passed_s / (linear_s + root)) if passed_s > 0 else 0)
        while self._time_of(steps) < now_s:
            steps += 1
        while steps > 0 and self._time_of(steps - 1) >= now_s:
            steps -= 1
        return steps

    def _look_at_queue(self, now_s: float) -> None:
        """Let in who is first in the queue, at the end of the step, if there is room."""
        while self._waiting and self._waiting[0].ended:
            self._waiting.popleft()
        if self.phase == "decode" and self._waiting and self._fits(self._waiting[0]):
            self._look_at_end_of_step(now_s)

    def _look_at_end_of_step(self, now_s: float) -> None:
        self.next_s = min(self.next_s, self._time_of(self._steps_until(now_s)))

    def _end_step(self, at_s: float, complete: list[EngineJob]) -> None:
        steps = self._steps_until(at_s)
        self._step += steps
        self._cached += steps * self._num
        while self._decoding and (self._decoding[0][2].ended or self._decoding[0][0] <= self._step):
            stop, _, job = heappop(self._decoding)
            if not job.ended:
                assert stop == self._step, "a request was decoded beyond its end"
                job.done = job.tokens
                self._leave(job, job.tokens)
                self._end(job, complete)

    def _end(self, job: EngineJob, complete: list[EngineJob]) -> None:
        job.ended, job.running = True, False
        complete.append(job)
        if job.trajectory is not None:
            kept = job.room - 1  # the last token was sampled, and not read
            self._num_kept += kept - self._kept.pop(job.trajectory, 0)
            self._kept[job.trajectory] = kept
            self._evict()

    def _end_prefill(self, complete: list[EngineJob]) -> None:
        for job in self._prefilling:
            if not job.spans or job.spans[-1][0] != self.version:
                job.spans.append((self.version, job.done))
            job.done += 1
            job.stop = self._step + job.tokens - job.done
            self._num += 1
            self._cached += job.prompt_tokens + job.done
            if job.done < job.tokens or job.ended:  # a cancelled one leaves at the change
                heappush(self._decoding, (job.stop, job.number, job))
                continue
            self._leave(job, job.done)
            self._end(job, complete)
        self._prefilling = []

    # ------------------------------------------------------------ changes of who is running

    def _leave(self, job: EngineJob, done: int) -> None:
        self._num -= 1
        self._cached -= job.prompt_tokens + done
        self._room -= job.room

    def _change(self, now_s: float) -> None:
        """Let requests go and come between two steps, and begin what is next."""
        for job in self._cancelled:
            job.running = False
            self._leave(job, self._done(job))
        self._cancelled.clear()
        self._since_s = now_s
        if self._pausing:
            self._retract()
            self.phase, self.next_s = "paused", math.inf
            return
        self._let_in()
        if self._prefilling:
            cost = self._cost
            tokens = sum(j.prompt_tokens - j.found + j.done for j in self._prefilling)
            seconds = cost.prefill_s + len(self._prefilling) * cost.request_s
            seconds += tokens * cost.prefill_token_s
            self.phase, self.next_s = "prefill", now_s + seconds
        elif self._num:
            self._begin_steps()
        else:
            self.phase, self.next_s = "idle", math.inf
            self._decoding.clear()

    def _begin_steps(self) -> None:
        cost, num = self._cost, self._num
        self._first_s = cost.step_s + num * cost.step_request_s
        self._first_s += self._cached * cost.step_cached_token_s
        self._growth_s = num * cost.step_cached_token_s
        while self._decoding[0][2].ended:
            heappop(self._decoding)
        self.phase = "decode"
        self.next_s = self._time_of(self._decoding[0][0] - self._step)

    def _done(self, job: EngineJob) -> int:
        """Return the tokens of a request that is decoded."""
        return job.tokens - (job.stop - self._step)

    def _retract(self) -> None:
        going = sorted(
            (job for _, _, job in self._decoding if not job.ended), key=lambda job: job.number
        )
        for job in going:
            job.done = self._done(job)
            job.running = False
        self._decoding.clear()
        self._waiting.extendleft(reversed(going))
        self._num = self._cached = self._room = 0

    def _let_in(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            if not job.ended:
                if not self._fits(job):
                    return
                self._prefilling.append(job)
                self._room += job.room
                self._find(job)
                job.running = True
            self._waiting.popleft()

    def _find(self, job: EngineJob) -> None:
        """Let a turn have what its trajectory left in the cache, and make room for the rest."""
        kept = 0 if job.trajectory is None else self._kept.pop(job.trajectory, 0)
        self._num_kept -= kept
        job.found = min(kept, job.prompt_tokens - 1)  # a prefill computes a token at least
        if not job.spans:
            job.cached = job.found
        self._evict()

    def _evict(self) -> None:
        room = self._cost.cache_tokens
        while room is not None and self._kept and self._room + self._num_kept > room:
            self._num_kept -= self._kept.pop(next(iter(self._kept)))

    def _fits(self, job: EngineJob) -> bool:
        cost, running = self._cost, self.running
        if running >= cost.max_running:
            return False
        # one that is larger than the whole cache runs alone
        full = cost.cache_tokens is not None and self._room + job.room > cost.cache_tokens
        return not full or running == 0
