"""Reads from a run's directory what its parts did and when: the other side of metrics/timeline.py.

Times are seconds from the begin of the trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.metrics.timeline import LEARNER, SYNC, TEACHER

RESOLVED, TRACE = "config.resolved.yaml", "trace.json"
MICROSECOND = 1e-6
STUDENT_ROW = "student "


@dataclass(frozen=True, slots=True)
class RolloutSpan:
    """Holds one response: who sampled it, from the request to the reply."""

    uid: int
    engine: str
    start_s: float
    stop_s: float
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Returns prompt and response tokens."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class ScoreSpan:
    """Holds one request to a teacher."""

    uid: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class UpdateSpan:
    """Holds one update of the learner."""

    start_s: float
    stop_s: float
    samples: int
    response_tokens: int


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """Holds one weight sync, and the pause inside it."""

    start_s: float
    stop_s: float
    paused_from_s: float
    resumed_s: float


AnySpan = TypeVar("AnySpan", RolloutSpan, ScoreSpan, UpdateSpan, SyncSpan)


@dataclass(frozen=True, slots=True)
class Recording:
    """Holds what a run did, each list in the order in which things began."""

    config: Config
    rollouts: tuple[RolloutSpan, ...]
    scores: tuple[ScoreSpan, ...]
    updates: tuple[UpdateSpan, ...]
    syncs: tuple[SyncSpan, ...]

    def until(self, stop_s: float) -> Recording:
        """Return what had ended by then."""
        return Recording(
            self.config,
            _ended(self.rollouts, stop_s),
            _ended(self.scores, stop_s),
            _ended(self.updates, stop_s),
            _ended(self.syncs, stop_s),
        )


def read_recording(run_dir: Path) -> Recording:
    """Read a run's configuration and trace.

    ValueError, in one line: a file is missing or no trace of a run. A trace that ends in the middle
    of a line (the run was killed) is read up to there.
    """
    trace = run_dir / TRACE
    if not trace.is_file():
        raise ValueError(f"{trace} does not exist: record a run with metrics.trace true")
    config = load_config(Config, run_dir / RESOLVED)
    rows: dict[int, str] = {}
    rollouts: list[RolloutSpan] = []
    scores: list[ScoreSpan] = []
    updates: list[UpdateSpan] = []
    syncs: list[tuple[float, float]] = []
    pauses: dict[tuple[float, float], None] = {}
    for event in _events(trace):
        if event["name"] == "process_name":
            rows[event["pid"]] = event["args"]["name"]
        if event["ph"] != "X":
            continue
        start_s, details = event["ts"] * MICROSECOND, event["args"]
        stop_s = start_s + event["dur"] * MICROSECOND
        row = rows[event["pid"]]
        if row == TEACHER:
            scores.append(ScoreSpan(details["uid"], start_s, stop_s))
        elif row == LEARNER:
            updates.append(
                UpdateSpan(start_s, stop_s, details["samples"], details["response_tokens"])
            )
        elif row == SYNC and event["name"].startswith("weight sync"):
            syncs.append((start_s, stop_s))
        elif row.startswith(STUDENT_ROW) and event["name"] == "paused":
            pauses[start_s, stop_s] = None
        elif row.startswith(STUDENT_ROW):
            rollouts.append(
                RolloutSpan(
                    details["uid"],
                    row.removeprefix(STUDENT_ROW),
                    start_s,
                    stop_s,
                    details["prompt_tokens"],
                    details["response_tokens"],
                )
            )
    return Recording(
        config,
        _in_order(rollouts),
        _in_order(scores),
        _in_order(updates),
        _in_order(_with_pauses(syncs, list(pauses))),
    )


def _ended(spans: Iterable[AnySpan], stop_s: float) -> tuple[AnySpan, ...]:
    return tuple(span for span in spans if span.stop_s <= stop_s)


def _in_order(spans: Iterable[AnySpan]) -> tuple[AnySpan, ...]:
    return tuple(sorted(spans, key=lambda span: span.start_s))


def _with_pauses(
    syncs: list[tuple[float, float]], pauses: list[tuple[float, float]]
) -> list[SyncSpan]:
    """Return the weight syncs, each with the pause that lies inside it."""
    found: list[SyncSpan] = []
    for start_s, stop_s in syncs:
        inside = [p for p in pauses if p[0] >= start_s - MICROSECOND and p[0] <= stop_s]
        paused_from_s, resumed_s = inside[0] if inside else (stop_s, stop_s)
        found.append(SyncSpan(start_s, stop_s, paused_from_s, resumed_s))
    return found


def _events(trace: Path) -> Iterator[dict[str, Any]]:
    """Yield the events, which TraceWriter writes one to a line."""
    with trace.open(encoding="utf-8") as lines:
        if lines.readline().strip() != "[":
            raise ValueError(f"{trace} is no trace of a run")
        for line in lines:
            text = line.strip().removesuffix(",")
            if text in ("", "]"):
                continue
            try:
                yield json.loads(text)
            except ValueError:
                return  # the run was killed while it wrote this
