"""One run of `python -m checks chaos`: `opd run`, hurt as planned and watched from outside."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from checks.chaos.machines import Machines
from checks.chaos.victims import Fault
from harness.run_dirs import summary_of, updates_of

CONFIG = "examples/arithmetic/demo.yaml"
UPDATES, EVERY = 20, 3
SETTINGS: Mapping[str, Any] = {
    "run.max_steps": UPDATES,
    "buffer.batch_size": 32,
    "rollout.concurrency": 48,
    "scoring.concurrency": 16,
    "checkpoint.every": EVERY,
    "checkpoint.every_minutes": 0,
    "checkpoint.export_hf": False,
    "evaluation.problems": 48,
    "metrics.tensorboard": False,
    "weight_sync.timeout_s": 60,
    "learner.timeout_s": 30,
}
LONGEST_CALM_S = 4.0
"""A fault comes so long after an update beyond those that the last fault found, at the latest."""
LIMIT_S = 600.0
"""A run that makes no update for so long does not come back."""
LEFT_BEHIND_S = 20.0
POLL_S = 0.05
LOST = re.compile(" is lost| is back| continues from |^continuing from ")
LAST = 10
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many processes a run has besides the teacher's server; raylets: 0 without Ray."""

    student_servers: int
    ranks: int
    raylets: int = 0

    @property
    def name(self) -> str:
        """What rows call it."""
        on = f" on {self.raylets} raylets" if self.raylets else ""
        return f"{self.student_servers}x{self.ranks}{on}"


class Stuck(RuntimeError):
    """A run made no update for too long."""


class ChaosRun:
    """Makes one run.

    Args:
        shape: its processes.
        machines: where they are.
        planned: what happens to it, in order.
        seed: of the run and of the moments.
        own: a directory for it alone.
        restarts: whether lost parts may be started again.
        more: settings besides.
    """

    def __init__(
        self,
        shape: Shape,
        machines: Machines,
        planned: Sequence[Fault],
        seed: int,
        own: Path,
        *,
        restarts: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.machines = machines
        self.planned, self.luck, self.own = list(planned), random.Random(seed), own
        self.run_dir, self.log = own / "run", own / "opd.log"
        limit = 20 if restarts else 0
        self.settings = (
            dict(SETTINGS)
            | machines.settings
            | {
                "run.dir": self.run_dir,
                "run.seed": seed,
                "student.servers": shape.student_servers,
                "learner.parallel.dp": shape.ranks,
                "student.max_restarts": limit,
                "teacher.max_restarts": limit,
                "learner.max_restarts": limit,
            }
            | dict(more or {})
        )
        self.left_behind: list[str] = []
        self.process = self._start()

    def figures(self) -> Tree:
        """Perform it; what happened and what it left. Nothing of it is left running."""
        began_s, faults, stuck = time.monotonic(), [], ""
        try:
            for fault in self.planned:
                hurt = self._hurt(fault)
                if hurt is None:
                    break
                faults.append(hurt)
            self._until(lambda: self.process.poll() is not None)
        except Stuck as error:
            stuck = str(error)
        finally:
            self._end()
        if self.process.returncode == 0:
            self._require_nothing_left(self.seen)
        for fault, following in itertools.zip_longest(faults, faults[1:]):
            fault["said"] = self._said(fault["said"], following and following["said"])
        rows, summary = updates_of(self.run_dir), summary_of(self.run_dir)
        times = [row["unix_time_s"] for row in rows]
        between = [b - a for a, b in itertools.pairwise(times)]
        return {
            "faults": faults,
            "exit_code": self.process.returncode,
            "stuck": stuck,
            "left_behind": self.left_behind,
            "said": [line for line in self._lines() if line.startswith("error:")],
            "wall_s": round(time.monotonic() - began_s, 1),
            "update_s": round(statistics.median(between), 2) if between else None,
            "rows": [
                {key: row[key] for key in ("update", "first_uid", "last_uid", "num_samples")}
                for row in rows
            ],
            "staleness_max": max((row["staleness_max_versions"] for row in rows), default=0),
            "staleness_bound": summary.get("staleness_bound_versions"),
            "reverse_kl_nats": mean([row["reverse_kl_nats"] for row in rows[-LAST:]]),
            "accuracy_pct": summary.get("student_accuracy_after_pct"),
            **{
                key: summary.get(key)
                for key in ("status", "updates", "samples_admitted", "samples_consumed")
            },
            "samples_dropped": sum(summary.get("samples_dropped", {}).values()),
            "samples_in_flight": summary.get("samples_in_flight"),
        }

    def _start(self) -> subprocess.Popen[bytes]:
        self.seen: set[psutil.Process] = set()
        sets = [
            word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")
        ]
        command = [sys.executable, "-m", "megatron_opd", "run", CONFIG, "--auto-resume", *sets]
        with self.log.open("ab") as log:
            environment = {"OMP_NUM_THREADS": "1"} | os.environ
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _hurt(self, fault: Fault) -> Tree | None:
        """Let one fault happen and wait until the run is past it; None: the run is over."""
        if not self._until(lambda: len(updates_of(self.run_dir)) > 0):
            return None
        moment_s = time.monotonic() + self.luck.uniform(0.0, LONGEST_CALM_S)
        self._until(lambda: time.monotonic() >= moment_s)
        found: list[Any] = []

        def there() -> bool:
            victim = self.machines.find(self.process.pid, fault, self.luck)
            found.extend([] if victim is None else [victim])
            return bool(found)

        if not self._until(there) or self._made_all():
            return None  # it trains no more
        lines, before, at_s = len(self._lines()), len(updates_of(self.run_dir)), time.monotonic()
        (victim,) = found
        victim.hurt(fault.how)
        if fault.who == "controller":
            self.process.wait()
            self._require_nothing_left(self.seen)
            self.process = self._start()
        fewest = [before]

        def beyond() -> bool:
            now = len(updates_of(self.run_dir))
            fewest.append(now)
            return now > before

        self._until(beyond)
        self.machines.mend(victim)
        return {
            "kind": str(fault),
            "process": victim.name,
            "after_updates": before,
            "lost_s": round(time.monotonic() - at_s, 2),
            "rolled_back": before - min(fewest),
            "said": lines,  # figures() puts what was said from there on
            **victim.doing,
        }

    def _made_all(self) -> bool:
        return len(updates_of(self.run_dir)) >= self.settings["run.max_steps"]

    def _until(self, happened: Any) -> bool:
        """Wait; False: the run is over before. Stuck: no update for too long."""
        updates, since_s = len(updates_of(self.run_dir)), time.monotonic()
        while not happened():
            if self.process.poll() is not None:
                return False
            now = len(updates_of(self.run_dir))
            if now != updates:
                updates, since_s = now, time.monotonic()
            if time.monotonic() - since_s > LIMIT_S:
                raise Stuck(f"no update for {LIMIT_S:g} s after {updates}: {self._lines()[-3:]}")
            self.seen.update(self.machines.processes(self.process.pid))
            time.sleep(POLL_S)
        return True

    def _require_nothing_left(self, seen: set[psutil.Process]) -> None:
        left = psutil.wait_procs(list(seen), timeout=LEFT_BEHIND_S)[1]
        for process in left:
            if process.status() != psutil.STATUS_ZOMBIE:
                self.left_behind.append(" ".join(process.cmdline())[:200])
                process.kill()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            psutil.wait_procs(list(self.seen), timeout=LEFT_BEHIND_S)

    def _said(self, first: int, end: int | None) -> list[str]:
        """What was said of lost parts in these lines."""
        lines = [line for line in self._lines()[first:end] if LOST.search(line)]
        return [line.replace(str(self.own), "DIR") for line in lines[:4]]

    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return round(sum(values) / len(values), 4) if values else None
