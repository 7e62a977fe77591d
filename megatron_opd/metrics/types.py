"""Defines typed reducers and the records that stages report.

A reducer says how values combine over a run, so that no reader has to guess: Mean is weighted
(tokens, seconds), Max keeps the largest, Sum adds, Histogram counts integers. An empty Mean or Max
has the value None, never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec


@dataclass(slots=True)
class Mean:
    """Averages with weights: sum(weight * value) / sum(weight)."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count `value` `weight` times; a non-finite value is a caller's error (ValueError)."""
        if not (math.isfinite(value) and weight >= 0):
            raise ValueError(
                f"a mean takes finite values and weights >= 0, got {value} and {weight}"
            )
        self.total += value * weight
        self.weight += weight

    @property
    def value(self) -> float | None:
        """Returns the mean, None before the first value."""
        return self.total / self.weight if self.weight else None


@dataclass(slots=True)
class Max:
    """Keeps the largest value seen."""

    value: float | None = None

    def add(self, value: float) -> None:
        """Keep the larger value."""
        if self.value is None or value > self.value:
            self.value = value


@dataclass(slots=True)
class Sum:
    """Sums the values added."""

    value: float = 0.0

    def add(self, value: float) -> None:
        """Add `value` to the sum."""
        self.value += value


@dataclass(slots=True)
class Histogram:
    """Counts integer values, e.g. response tokens by staleness in versions."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, value: int, count: int = 1) -> None:
        """Count `value` `count` times."""
        if count:
            self.counts[value] += count

    @property
    def mean(self) -> float | None:
        """Returns the mean of the counted values, None when empty."""
        total = sum(self.counts.values())
        return sum(value * n for value, n in self.counts.items()) / total if total else None

    @property
    def max(self) -> int | None:
        """Returns the largest counted value, None when empty."""
        return max(self.counts, default=None)

    def quantile(self, share: float) -> int | None:
        """Return the smallest value that `share` of the counted ones do not exceed.

        None when empty; share: in (0, 1].
        """
        left = share * sum(self.counts.values())
        for value in sorted(self.counts):
            left -= self.counts[value]
            if left <= 0:
                return value
        return max(self.counts, default=None)

    def as_json(self) -> dict[str, int]:
        """Return {value: count} with rising values (JSON keys are strings)."""
        return {str(value): self.counts[value] for value in sorted(self.counts)}


@dataclass(frozen=True, slots=True)
class Phase:
    """Times one named step of a weight sync, on the monotonic clock."""

    name: str
    started_s: float
    finished_s: float

    @property
    def seconds(self) -> float:
        """Returns how long it took, in seconds."""
        return self.finished_s - self.started_s


MEMORY_PHASES = ("offload", "resume weights", "resume cache")
"""Phases of a weight sync in which memory changes hands (weight_sync/memory.py)."""


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """Reports one weight sync. version: the one now live; phases: in order, without overlap.

    num_bytes: bytes the learner sent once (each server receives all of them). paused_from_s,
    resumed_s: when the servers were told to pause, and when all had continued. All are of the
    last of `tries` tries. learner_held_s: for how many seconds after the update no other one could
    begin, over all tries. servers: the urls of those that hold the version now. release_s: for how
    many seconds memory went from the servers to the learner before the update; None: they do not
    share it in turn (schedule.time_shared). teachers: weight syncs of teachers that follow, made
    just before this one.
    """

    version: int
    phases: tuple[Phase, ...]
    num_bytes: int
    paused_from_s: float
    resumed_s: float
    tries: int = 1
    learner_held_s: float = 0.0
    servers: tuple[str, ...] = ()
    release_s: float | None = None
    teachers: tuple[WeightSyncReport, ...] = ()

    @property
    def resume_s(self) -> float:
        """Returns for how many seconds memory went back to the servers."""
        return sum(phase.seconds for phase in self.phases if phase.name in MEMORY_PHASES)

    @property
    def started_s(self) -> float:
        """Returns the start of the first phase."""
        return self.phases[0].started_s

    @property
    def finished_s(self) -> float:
        """Returns the end of the last phase."""
        return self.phases[-1].finished_s

    @property
    def seconds(self) -> float:
        """Returns the seconds of the whole weight sync."""
        return self.finished_s - self.started_s

    @property
    def paused_s(self) -> float:
        """Returns how long no server sampled, in seconds."""
        return self.resumed_s - self.paused_from_s

    def phase_seconds(self) -> Mapping[str, float]:
        """Return the seconds by phase name."""
        return {phase.name: phase.seconds for phase in self.phases}


class UpdateFigures(Protocol):
    """Reports one update of the learner; every field also becomes a column of metrics.jsonl.

    A field that is None has no meaning for the estimator and becomes no column, except
    probs_diff_max, probs_diff_mean and mismatch_k3_nats: null in an update that had nothing to
    measure.
    Units as in the names; reverse_kl_nats is per response token; probs_diff_* is
    |p_learner - p_sampler| on path tokens that the current version sampled (TIS), over
    mismatch_tokens tokens, and probs_diff_free_* the same without routing replay; ratio_* are
    quantiles of the importance ratio.
    """

    @property
    def loss(self) -> float:
        """Returns the mean loss over response tokens."""
        ...

    @property
    def reverse_kl_nats(self) -> float | None:
        """Returns the estimate per response token; None without a teacher."""
        ...

    @property
    def cpu_s(self) -> float | None:
        """Returns the CPU seconds of the learner's first rank; None where they are not measured."""
        ...

    @property
    def grad_norm(self) -> float:
        """Returns the global norm of the gradient, before clipping."""
        ...

    @property
    def lr(self) -> float:
        """Returns the learning rate of the update."""
        ...

    @property
    def num_response_tokens(self) -> int:
        """Returns the number of response tokens trained on."""
        ...

    @property
    def probs_diff_max(self) -> float | None:
        """Returns the largest mismatch over the tokens measured; None without any."""
        ...

    @property
    def probs_diff_mean(self) -> float | None:
        """Returns the mean mismatch over the tokens measured; None without any."""
        ...

    @property
    def mismatch_tokens(self) -> int:
        """Returns how many tokens were measured."""
        ...

    @property
    def mismatch_k3_nats(self) -> float | None:
        """Returns the mean k3 of the mismatch over the tokens measured; None without any."""
        ...

    @property
    def probs_diff_free_max(self) -> float | None:
        """Returns probs_diff_max with the learner's own routing; None where not compared."""
        ...

    @property
    def probs_diff_free_mean(self) -> float | None:
        """Returns probs_diff_mean with the learner's own routing, over the same tokens."""
        ...

    @property
    def routing_moved_fraction(self) -> float | None:
        """Returns the share of replayed (position, layer) pairs that moved; None: no replay."""
        ...

    @property
    def ratio_p99(self) -> float:
        """Returns the 99th percentile of the importance ratio."""
        ...

    @property
    def ratio_max(self) -> float:
        """Returns the largest importance ratio p_learner / p_sampler of an action with weight.

        A path token that no draw hit weighs 0 and is left out. In the demo it is 45 to 889 at
        staleness 1 (1.0001 at 0): a draw besides the path, met by one of 64 draws, that the update
        since made likely. Ratios above 10 are 0.03% of the actions and 2% of a run's pull on the
        log-probs, though up to 31% of one update's (docs/metrics.md).
        """
        ...


class Depths(msgspec.Struct, frozen=True):
    """Counts how full the pipeline is at one moment, in samples.

    rolling: permits held by prompts that wait for or are in a rollout. scoring: rollouts that wait
    for or are at a teacher. buffered: scored samples not yet in a batch. permits_in_use of permits.
    """

    rolling: int
    scoring: int
    buffered: int
    permits_in_use: int
    permits: int


@dataclass(frozen=True, slots=True)
class Accounting:
    """Says where every admitted prompt went.

    in_flight: neither trained on nor dropped when the run ended.
    """

    updates: int
    version: int
    admitted: int
    consumed: int
    dropped: Mapping[str, int]
    in_flight: int
    interrupted: bool
