"""Looks at the processes of a case from outside."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import psutil

from checks.stalls.memory import Look, look, open_sockets, slope
from harness.processes import cpu_s

EVERY_S = 1.0
ANSWER_S = 30.0
LIMIT_S = 900.0
"""Besides the stall."""
CONTROLLER, WORKER = "checks.stalls.case", "checks.stalls.worker"
Event = dict[str, Any]


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
