"""One chunk of inputs through one target, judged. Deterministic in (target, seed, chunk).

Invariant: every input is counted exactly once, as refused, accepted, silent or crash.
"""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import FrameType
from typing import Any

from checks.fuzz.mutations import Maker

CHUNK = 200
# Of processor time: a busy machine is no hang.
HANG_S = 10
# Of an example in a report; the whole input can be made again from target, seed and chunk.
SHOWN = 240


@dataclass(frozen=True)
class Target:
    """One border.

    make: an input. call: takes one input, returns what the border made of it. declared: the
    exceptions that mean a refusal. oracle: (input, result) -> why it must have been refused, or
    None. share: inputs of a campaign, relative to the others: slow borders get fewer.
    """

    name: str
    make: Maker
    call: Callable[[Any], Any]
    declared: tuple[type[BaseException], ...]
    oracle: Callable[[Any, Any], str | None] = lambda given, result: None
    share: float = 1.0


@dataclass
class Tally:
    """What became of the inputs. findings: (kind, signature) -> how often and one example."""

    refused: int = 0
    accepted: int = 0
    silent: int = 0
    crashes: int = 0
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def find(self, kind: str, signature: str, given: object) -> None:
        """Count a crash or a silent acceptance."""
        found = self.findings.setdefault(f"{kind}: {signature}", {"count": 0, "example": ""})
        found["count"] += 1
        found["example"] = found["example"] or repr(given)[:SHOWN]


class Hang(BaseException):
    """An input took longer than HANG_S."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise Hang in the main thread after HANG_S."""

    def alarm(number: int, frame: FrameType | None) -> None:
        raise Hang(f"longer than {HANG_S} s")

    before = signal.signal(signal.SIGPROF, alarm)
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run_chunk(
    target: Target,
    seed: int,
    chunk: int,
    count: int = CHUNK,
    begun: Callable[[int], None] = lambda number: None,
) -> Tally:
    """`count` inputs; the first of each chunk that a seed makes are the same for any count.

    begun: told the number of each input before the border gets it.
    """
    tally = Tally()
    for number in range(count):
        begun(number)
        rng = Random(f"{target.name}:{seed}:{chunk}:{number}")
        judge(target, target.make(rng), tally)
    return tally


def judge(target: Target, given: Any, tally: Tally) -> None:
    """Call the border once and count what it did."""
    try:
        with limited():
            result = target.call(given)
    except target.declared as error:
        problem = message_problem(str(error))
        if problem is None:
            tally.refused += 1
        else:
            tally.crashes += 1
            tally.find("crash", f"{problem} ({place(error)})", given)
        return
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        tally.crashes += 1
        tally.find("crash", f"{type(error).__name__} ({place(error)})", given)
        return
    why = target.oracle(given, result)
    if why is None:
        tally.accepted += 1
    else:
        tally.silent += 1
        tally.find("silent", why, given)


def message_problem(message: str) -> str | None:
    """Why a refusal is no line for a terminal, or None."""
    if not message.strip():
        return "an empty message"
    if len(message) > 2000:
        return "a message of more than 2,000 characters"
    if not message.isprintable():
        return "a message with control characters"
    return None


def place(error: BaseException) -> str:
    """Where an error began: the last frame of this project, or the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if "megatron_opd" in frame.filename or "bridge" in frame.filename
    ]
    frame = (ours or frames)[-1]
    return f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}"


def merged(tallies: list[Tally]) -> Tally:
    """Sums, and every finding once."""
    whole = Tally()
    counts: Counter[str] = Counter()
    for tally in tallies:
        for name in ("refused", "accepted", "silent", "crashes"):
            counts[name] += getattr(tally, name)
        for signature, found in tally.findings.items():
            kept = whole.findings.setdefault(signature, {"count": 0, "example": found["example"]})
            kept["count"] += found["count"]
    for name, count in counts.items():
        setattr(whole, name, count)
    return whole
