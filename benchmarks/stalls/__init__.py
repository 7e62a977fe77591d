"""Memory of controller and data workers while the teacher or the learner stalls.

    python -m benchmarks stalls [--seconds S] [--only NAME ...] [--workers N ...]

Servers and the learner's head are fakes in processes of their own, samples have 4,096 tokens of 14
ids; all between them is real. All cases run at the same time: they wait. Of each process, from when
the permits are full: MiB at full speed before, at the beginning and at most, and the slope in KiB/s
with its standard error; sockets and asyncio tasks at the beginning and at the end; the share of a
core that it uses. Controls have so many permits that nothing is bounded, and must grow. `failed`:
cases that grew, or did not though they had to, or lost a sample, or trained on one twice.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import psutil

from benchmarks.stalls.cases import BY_NAME, CONTROL_S, SAMPLES, STALLS, Stall
from benchmarks.stalls.memory import Look, cpu_s, look, open_sockets, slope

EVERY_S = 1.0
ANSWER_S = 30.0
LIMIT_S = 900.0
"""Besides the stall."""
FLAT_MIB = 4.0
"""Less than eight samples; a run of 64 permits holds some 40 MiB of them."""
SPINS = 0.05
"""Of a core: who uses more does not wait."""
SAME = 2
"""Sockets and tasks may be more by so many: a question to a server may be on its way."""
CONTROLLER, WORKER = "benchmarks.stalls.case", "benchmarks.stalls.worker"
Event = dict[str, Any]


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return one row a case and number of workers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks stalls")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    given = parser.parse_args(list(options))
    cases = [
        (stall, workers, given.seconds if stall.bounded else min(given.seconds, CONTROL_S))
        for stall in STALLS
        if stall.name in given.only
        for workers in given.workers
    ]
    with ThreadPoolExecutor(len(cases)) as threads:
        rows = list(threads.map(lambda case: row_or_error(*case), cases))
    return {
        "samples": SAMPLES.name,
        "rows": rows,
        "failed": [f"{row['stall']}, {row['workers']}" for row in rows if not row["as_expected"]],
    }


def row_or_error(stall: Stall, workers: int, seconds: float) -> dict[str, Any]:
    """Return the row of a case; one that breaks must not end the others."""
    try:
        return row(stall, workers, seconds)
    except Exception as error:  # noqa: BLE001  it is in the record
        return {
            "stall": stall.name,
            "workers": workers,
            "error": f"{type(error).__name__}: {error}",
            "as_expected": False,
        }


def row(stall: Stall, workers: int, seconds: float) -> dict[str, Any]:
    """Run one case in a process of its own, and watch it."""
    command = [sys.executable, "-m", CONTROLLER, stall.name, str(workers), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        watch = Watch(process.pid, process.stdout)
        try:
            watch.until("steady", seconds)
            watch.find(workers)
            begin = watch.until("begin", seconds)
            parts = watch.begin()
            end = watch.until("end", seconds)
            measured = watch.end(parts)
            ending = {e["event"]: e for e in watch.rest(seconds)}
            process.wait(ANSWER_S)
        except BaseException:
            process.kill()
            raise
    whole = not stall.bounded or (
        ending["finished"]["lost"] == ending["finished"]["twice"] == 0
        and ending["finished"]["trained_on"] == ending["learner"]["taken"]
    )
    # one that goes on allocates as before, and not the same at every moment
    reference = "at_full_speed" if stall.teacher == "slow" else "begin"
    grew = any(
        part["private_mib"]["largest"] - part["private_mib"][reference] > FLAT_MIB
        for part in measured.values()
    )
    still = all(
        part[name]["end"] - part[name]["begin"] <= SAME
        for part in measured.values()
        for name in ("sockets", "tasks")
    )
    waits = stall.teacher == "slow" or all(part["cpu"] < SPINS for part in measured.values())
    within = end["most_in_flight"] <= end["permits"]
    return {
        "stall": stall.name,
        "workers": workers,
        "seconds": seconds,
        "request_timeout_s": stall.timeout_s,
        "processes": measured,
        "in_flight": {name: {"begin": begin[name], "end": end[name]} for name in DEPTHS},
        "most_in_flight": end["most_in_flight"],
        "permits": end["permits"],
        "updates_meanwhile": end["updates"] - begin["updates"],
        "tries_timed_out": end["tries_timed_out"],
        "tries_without_answer": end["tries_without_answer"],
        "supervisor": watch.said,
        "afterwards": ending,
        "flat": not grew,
        "as_expected": (
            (not grew and still and waits and within and whole) if stall.bounded else grew
        ),
    }


DEPTHS = ("rolling", "scoring", "buffered", "permits_in_use")


class Watch:
    """Looks at a case's controller and workers every second, and reads what they say."""

    def __init__(self, pid: int, lines: IO[bytes]) -> None:
        self._pid = pid
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._named: dict[str, int] = {}
        self._looks: dict[int, list[Look]] = {}
        self.said: list[str] = []
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def until(self, name: str, seconds: float) -> Event:
        """Return the next event of this name; look at the processes meanwhile, if any are known."""
        end_s = time.monotonic() + seconds + LIMIT_S
        while time.monotonic() < end_s:
            try:
                event = self._events.get(timeout=EVERY_S)
            except queue.Empty:
                for pid, looks in self._looks.items():
                    looks.append(look(pid, time.monotonic()))
                continue
            if event is None:
                raise RuntimeError(f"the case ended before it said {name}")
            if event["event"] == name:
                return event
            if event["event"] == "supervisor":
                self.said.append(event["said"])
        raise TimeoutError(name)

    def find(self, workers: int) -> None:
        """Begin to look at the processes, of a run at full speed."""
        named = {"controller": self._pid}
        for child in psutil.Process(self._pid).children():
            words = child.cmdline()
            if WORKER in words:
                named[f"worker {words[-1]}"] = child.pid
        assert len(named) == 1 + workers, named
        self._named = dict(sorted(named.items()))
        self._look_anew()

    def begin(self) -> dict[str, Beginning]:
        """Return by name what each process has now, and had until now; look anew."""
        looks = self._look_anew()
        return {name: Beginning(looks[pid], self._has(pid)) for name, pid in self._named.items()}

    def end(self, parts: dict[str, Beginning]) -> dict[str, dict[str, Any]]:
        """Return what each process did meanwhile; stop to look."""
        looks, self._looks = self._looks, {}
        return {
            name: part(parts[name], looks[pid], self._has(pid)) for name, pid in self._named.items()
        }

    def _look_anew(self) -> dict[int, list[Look]]:
        """Return the looks until now, and begin others."""
        before = self._looks
        self._looks = {pid: [look(pid, time.monotonic())] for pid in self._named.values()}
        return before

    def rest(self, seconds: float) -> list[Event]:
        """Return what is said until the end."""
        found: list[Event] = []
        while (event := self._events.get(timeout=seconds + LIMIT_S)) is not None:
            found.append(event)
            if event["event"] == "supervisor":
                self.said.append(event["said"])
        return found

    def _has(self, pid: int) -> dict[str, float]:
        os.kill(pid, signal.SIGUSR1)
        while True:
            event = self._events.get(timeout=ANSWER_S)
            assert event is not None, "the case ended"
            if event["event"] == "tasks" and event["pid"] == pid:
                break
        has = {"sockets": open_sockets(pid), "tasks": event["tasks"]}
        return has | {"cpu_s": cpu_s(pid), "at_s": time.monotonic()}

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            self._events.put(json.loads(line))
        self._events.put(None)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Holds what a process had at full speed, and what it has besides memory as the time begins."""

    looks: Sequence[Look]
    has: dict[str, float]


def part(begin: Beginning, looks: Sequence[Look], after: dict[str, float]) -> dict[str, Any]:
    """Describe what a process did between two moments."""
    before = begin.has
    found: dict[str, Any] = {
        name: {"begin": before[name], "end": after[name]} for name in ("sockets", "tasks")
    }
    for name in ("private", "pss", "rss"):
        values = [getattr(each, name) for each in looks]
        rate, error = slope(looks, name)
        found[f"{name}_mib"] = {
            "at_full_speed": round(max(getattr(each, name) for each in begin.looks), 2),
            "begin": round(values[0], 2),
            "largest": round(max(values), 2),
            "end": round(values[-1], 2),
            "kib_s": round(rate, 3),
            "kib_s_error": round(error, 3),
        }
    used_s = after["cpu_s"] - before["cpu_s"]
    return found | {"cpu": round(used_s / (after["at_s"] - before["at_s"]), 4), "looks": len(looks)}
