"""Measures a run's speed: throughput, overlap and idle ratios, by AsyncOPD (2606.24143) App. G.

    throughput = sum_{j=6}^{J} n_j / (t_J - t_5)
    overlap    = (T_rollout + T_teacher + T_train) / T_wall

n_j: response tokens of update j (1-based), t_j: the time at which it was done; the first five
updates are warm-up. T_teacher and T_train: merged busy time of the stage. T_rollout: merged busy
time of each engine, averaged over the engines. T_wall: first start to last end over all stages.
Overlap is about 1 for a serial schedule and at most 3. A rollout that is paused by a
weight sync is not counted as busy (the paper does not say; this is the smaller number), and neither
is one whose environment answers, of which no server knows.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_opd.metrics.intervals import BusyTime

WARMUP_UPDATES = 5


class Throughput:
    """Collects (n_j, t_j): tokens and finishing time of every update."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._done_s: list[float] = []

    def add(self, response_tokens: int, done_s: float) -> None:
        """Count one update that was done at `done_s`."""
        self._tokens.append(response_tokens)
        self._done_s.append(done_s)

    @property
    def updates(self) -> list[tuple[int, float]]:
        """Returns (n_j, t_j) of every update."""
        return list(zip(self._tokens, self._done_s, strict=True))

    def tokens_per_s(self, warmup_updates: int = WARMUP_UPDATES) -> float | None:
        """Return response tokens per second after the warm-up; None without a later update.

        With warmup_updates=0 there is no t_0 to start from: the first update only starts the clock.
        """
        first = max(warmup_updates, 1)
        if len(self._tokens) <= first:
            return None
        seconds = self._done_s[-1] - self._done_s[first - 1]
        return sum(self._tokens[first:]) / seconds if seconds > 0 else None


class StageTimes:
    """Holds the busy times of every stage.

    Args:
        engines: names of the student engines; one that never finishes a rollout counts as idle.
    """

    def __init__(self, engines: Iterable[str] = ()) -> None:
        self.rollout: dict[str, BusyTime] = {engine: BusyTime() for engine in engines}
        self.teacher = BusyTime()
        self.train = BusyTime()
        self.weight_sync = BusyTime()
        self.paused = BusyTime()

    def add_rollout(self, engine: str, start_s: float, stop_s: float) -> None:
        """Count a rollout that occupied `engine`."""
        self.rollout.setdefault(engine, BusyTime()).add(start_s, stop_s)

    @property
    def wall_s(self) -> float:
        """Returns the seconds from first start to last end over rollout, teacher and train."""
        spans = [
            interval
            for stage in (*self.rollout.values(), self.teacher, self.train)
            for interval in stage.intervals
        ]
        if not spans:
            return 0.0
        return max(stop_s for _, stop_s in spans) - min(start_s for start_s, _ in spans)

    @property
    def rollout_s(self) -> float:
        """Returns the busy seconds of the average engine, weight syncs excluded."""
        busy = [engine.seconds_outside(self.paused) for engine in self.rollout.values()]
        return sum(busy) / len(busy) if busy else 0.0

    def overlap(self) -> float | None:
        """Returns the stages busy at once on average, in [0, 3]; None before anything happened."""
        wall_s = self.wall_s
        if wall_s <= 0:
            return None
        return (self.rollout_s + self.teacher.seconds + self.train.seconds) / wall_s

    def learner_idle_ratio(self) -> float | None:
        """Returns the share of T_wall in which the learner neither trains nor sends weights."""
        wall_s = self.wall_s
        if wall_s <= 0:
            return None
        busy_s = self.train.seconds + self.weight_sync.seconds_outside(self.train)
        return max(0.0, 1.0 - busy_s / wall_s)

    def fleet_idle_ratio(self) -> float | None:
        """Returns the share of T_wall in which the average student engine is idle or paused."""
        wall_s = self.wall_s
        return max(0.0, 1.0 - self.rollout_s / wall_s) if wall_s > 0 else None
