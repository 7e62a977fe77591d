"""Reads from a run's directory what its parts did and when: the other side of metrics/timeline.py.

Times are seconds from the begin of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_opd.metrics.intervals import Interval
from megatron_opd.metrics.timeline import CORES, CPU, LEARNER, SYNC, TEACHER, WORK
from megatron_opd.metrics.trace_events import (
    MICROSECOND,
    ROW_NAME,
    DamagedEvent,
    TraceEvent,
    trace_event,
)
from megatron_opd.sim.costs import RecordedLengths, TurnLength
from sglang_bridge.work import ServerWork

TRACE = "trace.json"
STUDENT_ROW = "student "
COUNTS = ("uid", "prompt_tokens", "response_tokens")


@dataclass(frozen=True, slots=True)
class RolloutSpan:
    """Holds one response: who sampled it, from the request to the reply.

    Of a trajectory: who sampled its last turn, and its turns; response_tokens are all that were
    sampled.
    """

    uid: int
    engine: str
    start_s: float
    stop_s: float
    prompt_tokens: int
    response_tokens: int
    turns: tuple[TurnLength, ...] = ()

    @property
    def given_tokens(self) -> int:
        """Returns the tokens that were not sampled."""
        return sum(turn.given for turn in self.turns) or self.prompt_tokens

    @property
    def requests(self) -> int:
        """Returns how often a server was asked."""
        return len(self.turns) or 1


@dataclass(frozen=True, slots=True)
class ScoreSpan:
    """Holds one request to a teacher."""

    uid: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class UpdateSpan:
    """Holds one update of the learner. cpu_s: of its first rank; None: not measured."""

    start_s: float
    stop_s: float
    samples: int
    response_tokens: int
    cpu_s: float | None


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """Holds one weight sync, and the pause inside it."""

    start_s: float
    stop_s: float
    paused_from_s: float
    resumed_s: float


@dataclass(frozen=True, slots=True)
class WorkSeen:
    """Holds what a server had done by a moment, since its process started."""

    server: str
    teaches: bool
    now_s: float
    work: ServerWork


@dataclass(frozen=True, slots=True)
class CpuSeen:
    """Holds the CPU seconds that the parts on the controller's machine had used by a moment.

    seconds: by part, the controller's or a server's url. cores: that the machine has.
    """

    now_s: float
    cores: float
    seconds: dict[str, float]


AnySpan = TypeVar("AnySpan", RolloutSpan, ScoreSpan, UpdateSpan, SyncSpan)


@dataclass(frozen=True, slots=True)
class Recording:
    """Holds what a run did, each list in the order in which things began."""

    rollouts: tuple[RolloutSpan, ...]
    scores: tuple[ScoreSpan, ...]
    updates: tuple[UpdateSpan, ...]
    syncs: tuple[SyncSpan, ...]
    works: tuple[WorkSeen, ...] = ()
    cpus: tuple[CpuSeen, ...] = ()

    def until(self, stop_s: float) -> Recording:
        """Return what had ended by then."""
        return Recording(
            _ended(self.rollouts, stop_s),
            _ended(self.scores, stop_s),
            _ended(self.updates, stop_s),
            _ended(self.syncs, stop_s),
            tuple(seen for seen in self.works if seen.now_s <= stop_s),
            tuple(seen for seen in self.cpus if seen.now_s <= stop_s),
        )

    @property
    def lengths(self) -> RecordedLengths:
        """Returns given and response tokens of every rollout, and the turns of trajectories."""
        return RecordedLengths(
            pairs=[(r.given_tokens, r.response_tokens) for r in self.rollouts],
            trajectories=[r.turns for r in self.rollouts if r.turns],
        )


def read_recording(run_dir: Path) -> Recording:
    """Read the trace of a run, also of one that was killed while it wrote a line.

    ValueError, in one line: there is none, it holds no rollout, or it is not a run's.
    """
    trace = run_dir / TRACE
    found = _Found()
    try:
        lines = trace.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"{trace}: {cause}; metrics.trace writes it") from None
    for number, line in enumerate(lines, 1):
        try:
            if event := trace_event(line.encode()):
                found.add(event)
        except (KeyError, ValueError) as error:
            if number == len(lines) and isinstance(error, DamagedEvent):
                break
            raise ValueError(f"{trace}:{number}: not an event of a run") from None
    if not found.rollouts:
        raise ValueError(f"{trace} holds no rollout")
    return found.recording()


class _Found:
    """Collects spans, in the order of the file."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}
        self.rollouts: list[RolloutSpan] = []
        self.scores: list[ScoreSpan] = []
        self.updates: list[UpdateSpan] = []
        self.syncs: list[Interval] = []
        self.pauses: dict[Interval, None] = {}  # every engine's row has them
        self.works: list[WorkSeen] = []
        self.cpus: list[CpuSeen] = []

    def add(self, event: TraceEvent) -> None:
        """Take an event of metrics/timeline.py; those that are no span do not matter."""
        if event.name == ROW_NAME:
            self.rows[event.pid] = event.args["name"]
        if event.ph not in ("X", "i", "C"):
            return
        name, row, details = event.name, self.rows[event.pid], event.args
        start_s, stop_s = _number(event.start_s, float), event.stop_s
        if event.ph == "i" and name == WORK:
            fields = dict(details)
            server, work = fields.pop("server"), msgspec.convert(fields, ServerWork)
            self.works.append(WorkSeen(server, row == TEACHER, start_s, work))
        elif event.ph == "C" and name == CPU:
            seconds = {part: _number(value, float | int) for part, value in details.items()}
            self.cpus.append(CpuSeen(start_s, seconds.pop(CORES), seconds))
        if event.ph != "X":
            return
        if row == TEACHER:
            self.scores.append(ScoreSpan(_number(details["uid"]), start_s, stop_s))
        elif row == LEARNER:
            samples, tokens = _number(details["samples"]), _number(details["response_tokens"])
            cpu_s = details.get("cpu_s")
            if cpu_s is not None:
                cpu_s = _number(cpu_s, float | int)
            self.updates.append(UpdateSpan(start_s, stop_s, samples, tokens, cpu_s))
        elif row == SYNC and name.startswith("weight sync"):
            self.syncs.append((start_s, stop_s))
        elif row.startswith(STUDENT_ROW) and name == "paused":
            self.pauses[start_s, stop_s] = None
        elif row.startswith(STUDENT_ROW):
            engine = row.removeprefix(STUDENT_ROW)
            uid, prompt, response = (_number(details[key]) for key in COUNTS)
            if not prompt:
                raise ValueError("a prompt has a token at least")
            turns = _turns(details.get("turns", []))
            span = RolloutSpan(uid, engine, start_s, stop_s, prompt, response, turns)
            self.rollouts.append(span)

    def recording(self) -> Recording:
        """Return what was found, in order."""
        return Recording(
            _in_order(self.rollouts),
            _in_order(self.scores),
            _in_order(self.updates),
            _in_order(_with_pauses(self.syncs, list(self.pauses))),
            tuple(self.works),
            tuple(self.cpus),
        )


def _turns(found: Any) -> tuple[TurnLength, ...]:
    """Return the turns of a trajectory. ValueError: they are none."""
    turns = msgspec.convert(found, tuple[TurnLength, ...])
    for turn in turns:
        for value in (turn.given, turn.sampled, turn.answer_s):
            _number(value, float | int)
    return turns


def _number(value: Any, kind: Any = int) -> Any:
    """Return a finite number >= 0 as it is. ValueError: it is none."""
    if type(value) is bool or not isinstance(value, kind) or not 0 <= value < math.inf:
        raise ValueError(f"not a number in range: {value}")
    return value


def _ended(spans: Iterable[AnySpan], stop_s: float) -> tuple[AnySpan, ...]:
    return tuple(span for span in spans if span.stop_s <= stop_s)


def _in_order(spans: Iterable[AnySpan]) -> tuple[AnySpan, ...]:
    return tuple(sorted(spans, key=lambda span: span.start_s))


def _with_pauses(syncs: Sequence[Interval], pauses: Sequence[Interval]) -> list[SyncSpan]:
    """Return the weight syncs, each with the pause that lies inside it."""
    found: list[SyncSpan] = []
    for start_s, stop_s in syncs:
        inside = [p for p in pauses if p[0] >= start_s - MICROSECOND and p[0] <= stop_s]
        paused_from_s, resumed_s = inside[0] if inside else (stop_s, stop_s)
        found.append(SyncSpan(start_s, stop_s, paused_from_s, resumed_s))
    return found
