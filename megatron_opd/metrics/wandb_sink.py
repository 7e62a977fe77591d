"""Hands rows to a process that talks to Weights & Biases (wandb_process.py).

Nothing here waits for it while a run makes updates: rows go into a pipe that never blocks, and when
they pile up, or the process is gone, one warning is given and the run goes on without.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_opd.config.metrics import MetricNames, WandbConfig
from megatron_opd.metrics.scalars import evaluation_scalars, scalars

logger = logging.getLogger(__name__)

STATE = "wandb.json"
"""Name of the file in run.dir that keeps the W&B run's id, so that a resumed run continues it."""
INSTALL = "metrics.wandb needs the package wandb: pip install 'megatron-opd[wandb]'"
INIT_S = 15.0
"""Longest time in seconds to reach W&B; then the run is kept offline."""
FINISH_S = 20.0
"""Longest time in seconds that the end of a run waits until W&B has everything."""
BACKLOG_BYTES = 4 * 2**20
"""Rows that may wait for the process: some thousand; more means that it does not read."""
COMMAND = (sys.executable, "-m", "megatron_opd.metrics.wandb_process")


def installed() -> bool:
    """Return whether wandb is; a directory `wandb`, as it makes them itself, is no package."""
    try:
        metadata.version("wandb")
    except metadata.PackageNotFoundError:
        return False
    return True


class WandbSink:
    """Sends rows to a W&B run.

    Args:
        settings: which run it is.
        directory: run.dir; the state file and W&B's own files are made there.
        log: where the process writes what W&B says.
        config: shown as the run's configuration.
        names: whose metric names are used.
        command: what starts the process.
        finish_s: how long `close` waits for it.
    """

    def __init__(
        self,
        settings: WandbConfig,
        directory: Path,
        log: Path,
        config: Mapping[str, Any],
        names: MetricNames,
        command: Sequence[str] = COMMAND,
        finish_s: float = FINISH_S,
    ) -> None:
        self._names: MetricNames = names
        self._log, self._finish_s = log, finish_s
        self._waiting, self._heard = bytearray(), b""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with log.open("ab") as stream:
                # a session of its own: a signal that ends the run does not cut off its last rows
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    start_new_session=True,
                )
        except OSError as error:
            self._warn(f"its process cannot be started: {error.strerror}")
            return
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._rows, self._reports = process, process.stdin, process.stdout
        for pipe in (self._rows, self._reports):
            os.set_blocking(pipe.fileno(), False)
        about = settings.model_dump(mode="json")
        about["name"] = settings.name or directory.absolute().name
        about |= {"directory": str(directory), "init_s": INIT_S, "finish_s": finish_s}
        self._send(about | {"config": config})

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Hand over the row's numbers."""
        self._send({"update": update, "values": scalars(row, self._names)})

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Hand over an evaluated set's numbers."""
        self._send({"update": row["update"], "values": evaluation_scalars(row)})

    def close(self) -> None:
        """Wait until W&B has everything, for at most `finish_s`; safe to call twice."""
        if (process := self._process) is None:
            return
        deadline_s = time.monotonic() + self._finish_s
        while self._waiting and (left_s := deadline_s - time.monotonic()) > 0:
            select.select((), (self._rows,), (), left_s)
            if not self._flush():
                return
        with contextlib.suppress(BrokenPipeError):
            self._rows.close()
        try:
            # it ends by itself after finish_s, so this is for one that cannot even do that
            process.wait(max(0.0, deadline_s - time.monotonic()) + 1)
        except subprocess.TimeoutExpired:
            self._give_up(self._unfinished)
            return
        self._hear()
        if process.returncode == -signal.SIGKILL:
            self._give_up(self._unfinished)
        elif process.returncode != 0:
            self._give_up(f"its process ended with status {process.returncode}")
        self._process = None
        self._reports.close()

    @property
    def _unfinished(self) -> str:
        return f"it did not finish within {self._finish_s:g} s (`wandb sync` sends what is left)"

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        self._waiting += (json.dumps(message, allow_nan=False) + "\n").encode()
        self._hear()
        if self._flush() and len(self._waiting) > BACKLOG_BYTES:
            self._give_up("its process takes no rows")

    def _flush(self) -> bool:
        """Write what the pipe takes. Returns whether the process is there."""
        try:
            written = os.write(self._rows.fileno(), self._waiting) if self._waiting else 0
        except BlockingIOError:
            written = 0
        except OSError:
            self._give_up("its process has ended")
            return False
        del self._waiting[:written]
        return True

    def _hear(self) -> None:
        """Pass on the lines that the process reports: what the user should know."""
        try:
            self._heard += self._reports.read() or b""
        except OSError:
            return
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._warn(line.decode(errors="replace"))

    def _give_up(self, why: str) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._warn(why)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._rows.close()
        self._reports.close()

    def _warn(self, what: str) -> None:
        logger.warning(
            "wandb: %s; the run goes on, its rows are in metrics.jsonl (log: %s)", what, self._log
        )
