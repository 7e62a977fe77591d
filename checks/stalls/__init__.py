"""Memory of controller and data workers while the teacher or the learner stalls.

    python -m checks stalls [--seconds S] [--only NAME ...] [--workers N ...]

Servers and the learner's head are fakes in processes of their own, samples have 4,096 tokens of 14
ids; all between them is real. All cases run at the same time: they wait. Of each process, from when
the permits are full: MiB at full speed before, at the beginning and at most, and the slope in KiB/s
with its standard error; sockets and asyncio tasks at the beginning and at the end; the share of a
core that it uses. Controls have so many permits that nothing is bounded, and must grow. `failed`:
cases that grew, or did not though they had to, or lost a sample, or trained on one twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from checks.stalls.cases import BY_NAME, CONTROL_S, SAMPLES, STALLS, Stall
from checks.stalls.faults import GREW, faults
from checks.stalls.watch import ANSWER_S, CONTROLLER, Watch

LEAST_S = 20.0
DEPTHS = ("rolling", "scoring", "buffered", "permits_in_use")


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return one row a case and number of workers."""
    parser = argparse.ArgumentParser(prog="python -m checks stalls")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    given = parser.parse_args(list(options))
    if given.seconds < LEAST_S:
        parser.error(f"--seconds must be at least {LEAST_S:g}, got {given.seconds:g}")
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
    found = faults(stall, measured, end, ending)
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
        "flat": GREW not in found,
        "faults": found,
        "as_expected": found == [] if stall.bounded else GREW in found,
    }
