"""What a run's processes took: memory as PSS, processor seconds by part.

A part is a name and words that a command line holds; a process whose command line holds them
belongs to it with all of its descendants. Whatever belongs to no part is the root's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import psutil

from harness.processes import cpu_s

RISE = 1.01
"""PSS is read when the sum of resident sizes is this many times what it was at the last reading."""


@dataclass(frozen=True, slots=True)
class Process:
    """What Linux says of one process. cpu_s: of its own threads alone."""

    pid: int
    parent: int
    command: str
    cpu_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment of a run: at_s by the monotonic clock, cpu_s by part."""

    at_s: float
    cpu_s: Mapping[str, float]


def below(root: int) -> list[Process]:
    """Read `root` and what descends from it; empty where it has ended."""
    found: list[Process] = []
    # one may end between being listed and being read
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(root)
        for each in [first, *first.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                command, resident = " ".join(each.cmdline()), each.memory_info().rss
                found.append(Process(each.pid, each.ppid(), command, cpu_s(each.pid), resident))
    return found


def parts_of(
    processes: Iterable[Process], root: int, parts: Mapping[str, str], rest: str
) -> dict[int, str]:
    """Return the part of every process, by pid. parts: words in a command line, by name."""
    by_pid = {process.pid: process for process in processes}
    found: dict[int, str] = {}

    def part(pid: int) -> str:
        if pid not in found:
            process = by_pid[pid]
            named = [name for name, words in parts.items() if words in process.command]
            inherits = pid != root and process.parent in by_pid
            found[pid] = named[0] if named else part(process.parent) if inherits else rest
        return found[pid]

    for pid in by_pid:
        part(pid)
    return found


@dataclass
class Watch:
    """Looks at the processes below `root` in a thread while it is entered.

    Reading the PSS of a process walks all of its pages, in processor time of the machine that is
    measured: it is read only when the sum of resident sizes, which costs nothing, is higher by RISE
    than at any reading before. Processor seconds of a process count after it has ended, too.
    every_s: between two looks; a peak that is shorter is missed.
    """

    root: int
    parts: Mapping[str, str]
    rest: str
    every_s: float = 0.5
    samples: list[Sample] = field(default_factory=list)
    pss_bytes: list[Mapping[str, int]] = field(default_factory=list)
    _known: dict[int, tuple[str, float]] = field(default_factory=dict)
    _highest: int = 0

    def __post_init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="processes", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self.every_s):
            self.look()

    def look(self) -> None:
        """Take one sample; none where the root has ended."""
        processes = below(self.root)
        if not processes:
            return
        part = parts_of(processes, self.root, self.parts, self.rest)
        self._known |= {each.pid: (part[each.pid], each.cpu_s) for each in processes}
        cpu = dict.fromkeys([self.rest, *self.parts], 0.0)
        for name, seconds in self._known.values():
            cpu[name] += seconds
        self.samples.append(Sample(time.monotonic(), cpu))
        resident = sum(each.resident_bytes for each in processes)
        if resident > RISE * self._highest:
            self._highest = resident
            self.pss_bytes.append(self._pss(part))

    def _pss(self, part: Mapping[int, str]) -> dict[str, int]:
        pss = dict.fromkeys([self.rest, *self.parts], 0)
        for pid, name in part.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                pss[name] += psutil.Process(pid).memory_full_info().pss
        return pss

    def peak_pss_bytes(self) -> Mapping[str, int]:
        """Return the readings with the largest sum, by part."""
        return max(self.pss_bytes, key=lambda by_part: sum(by_part.values()))


def cpu_between(samples: list[Sample], from_s: float, to_s: float) -> dict[str, float]:
    """Return each part's processor seconds between two moments, interpolated.

    Raises ValueError where the samples do not enclose them.
    """
    return {
        name: cpu_at(samples, name, to_s) - cpu_at(samples, name, from_s)
        for name in samples[-1].cpu_s
    }


def cpu_at(samples: list[Sample], name: str, at_s: float) -> float:
    """Return a part's processor seconds until `at_s`, a line between two samples."""
    for before, after in pairwise(samples):
        if before.at_s <= at_s <= after.at_s:
            share = (at_s - before.at_s) / (after.at_s - before.at_s)
            return before.cpu_s[name] + share * (after.cpu_s[name] - before.cpu_s[name])
    raise ValueError(f"no samples on both sides of {at_s}")
