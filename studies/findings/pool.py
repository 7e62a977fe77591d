"""Runs what is missing of a list of trials, several at a time, and keeps a row of each as it ends.

Each worker has a pair of servers of its own and takes the next trial of the list. Where training
never waits for a clock (`controlled`, `sync`) runs beside each other change nothing but their
seconds. A trial whose loss stops being finite is a result (`diverged`). One that fails otherwise is
tried once more with new servers; then the pool ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from harness.case_rows import append_row
from harness.header import machine
from harness.run_dirs import summary_of
from harness.tree import clean_commit
from sglang_bridge.errors import BridgeError
from sglang_bridge.server.launch import last_lines
from studies.findings import exported
from studies.findings.rows import Row, row_of
from studies.findings.servers import Pair, serving
from studies.grid.trials import (
    KeptRows,
    Trial,
    finished_rows,
    say_ended,
    status_of,
)

FIRST_PORT = 21900  # below the range from which the system hands out ports
ATTEMPTS = 2


@dataclass
class Pool:
    """What the workers share.

    left: trials to run. rows: the file of rows. commit: of the code, asked before each run. ends_s:
    when no more begin. running: their processes now.
    """

    left: deque[Trial]
    rows: Path
    out: Path
    commit: Callable[[], str]
    ends_s: float
    total: int
    done: int
    found: dict[str, Row] = field(default_factory=dict[str, Row])
    failed: BaseException | None = None
    running: set[subprocess.Popen[bytes]] = field(default_factory=set[subprocess.Popen[bytes]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> Trial | None:
        """The next trial; null where none is left, time is up or a worker has failed."""
        with self.lock:
            late = time.monotonic() >= self.ends_s
            return None if late or self.failed or not self.left else self.left.popleft()

    def run(self, command: list[str], log: Path) -> int:
        """Run a command to its end; its exit status."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        with self.lock:
            self.running.add(process)
        code = process.wait()
        with self.lock:
            self.running.discard(process)
        return code

    def stop(self, cause: BaseException) -> None:
        """Begin no more trials, and let those that run end early."""
        with self.lock:
            self.failed = self.failed or cause
            for process in self.running:
                process.send_signal(signal.SIGINT)

    def keep(self, row: Row, seconds: float) -> None:
        """Write a row, and say so."""
        with self.lock:
            append_row(self.rows, row)
            self.found[row["name"]] = row
            self.done += 1
            say_ended(row, f"{self.done}/{self.total}", seconds)


def run_missing(
    trials: Sequence[Trial],
    rows: Path,
    out: Path,
    *,
    jobs: int,
    budget_s: float,
    commit: Callable[[], str] | None = None,
    clean: bool = False,
) -> dict[str, Row]:
    """Rows of the trials that are finished, by name, after running what can be run in time.

    commit: of the code; clean_commit unless one is given. clean: rows of a tree that differed from
    its commit are made again.
    """
    out.mkdir(parents=True, exist_ok=True)
    kept = finished_rows(trials, KeptRows(rows, clean=clean))
    left = deque(trial for trial in trials if trial.name not in kept)
    ends_s = time.monotonic() + budget_s
    asked = commit or clean_commit
    pool = Pool(left, rows, out, asked, ends_s, total=len(trials), done=len(kept), found=dict(kept))
    if left and budget_s > 0:
        workers = min(jobs, len(left))
        with ThreadPoolExecutor(workers) as threads:
            working = [threads.submit(_work, pool, number) for number in range(workers)]
            try:
                wait(working)
            except BaseException as error:  # Ctrl-C, or SIGTERM where it is heeded as that
                pool.stop(error)
                raise
    if pool.failed is not None:
        raise pool.failed
    return pool.found


def _work(pool: Pool, number: int) -> None:
    """Run trials of the pool until none is left."""
    try:
        trial, attempt = pool.take(), 1
        while trial is not None:
            with ExitStack() as stack:
                ports = (FIRST_PORT + 2 * number, FIRST_PORT + 2 * number + 1)
                pair = stack.enter_context(serving(trial.config, pool.out / "servers", ports))
                config = trial.config
                while trial is not None and trial.config == config:
                    started, of_commit = time.monotonic(), pool.commit()
                    row = _run(trial, pool, pair)
                    if row is None and pool.failed is not None:
                        return  # it was ended, and nothing begins any more
                    if row is None and attempt == ATTEMPTS:
                        log = last_lines(pool.out / f"{trial.name}.log")
                        raise RuntimeError(f"{trial.name} failed twice:\n{log}")
                    if row is None:
                        attempt += 1
                        break  # other servers
                    row |= {"commit": of_commit, "cpu": machine()["cpu"]}
                    pool.keep(row, time.monotonic() - started)
                    trial, attempt = pool.take(), 1
    except Exception as error:
        pool.stop(error)
        raise


def _run(trial: Trial, pool: Pool, pair: Pair) -> Row | None:
    """One run, with these servers; null where it failed for another reason than its loss."""
    run_dir = pool.out / trial.name
    try:
        pair.rewind()
    except BridgeError:
        return None
    command = trial.command(run_dir)
    for key, value in pair.overrides.items():
        command += ["--set", f"{key}={value}"]
    code = pool.run(command, pool.out / f"{trial.name}.log")
    status = status_of(summary_of(run_dir), code)
    if status is None:
        return None
    row = row_of(trial, run_dir, status)
    checkpoint = exported.exported_by(run_dir)
    if checkpoint is not None:
        found, log = run_dir / "exported.json", pool.out / f"{trial.name}.eval.log"
        if pool.run(exported.command(trial.config, checkpoint, found), log):
            return None
        row["summary"][exported.KEY] = exported.accuracy_pct(found)
    shutil.rmtree(run_dir)
    return row
