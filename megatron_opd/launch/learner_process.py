"""Runs the learner as a child process, ended by the ids of its process tree.

It is a torchrun world, or for one rank the rank itself: torchrun would be a process of 0.15 GB that
does nothing but wait for it.

Invariant: after `stop` returns no process of the tree is left, whatever state it was in.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.launch.specs import ON_GPUS
from megatron_opd.wire.keys import RANK_VARIABLE, RankKeys
from sglang_bridge.gpus import let_see
from sglang_bridge.lifetime import PARENT_VARIABLE
from sglang_bridge.server.launch import next_log

WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")
"""What tells a process that it is a rank of a world, and of which; torchrun sets them anew."""


def learner_command(config_file: Path, learner: LearnerConfig, extra: Sequence[str]) -> list[str]:
    """Return what starts the learner on one machine, as an argument list.

    `python -m megatron_opd.learner CONFIG ...`, under torchrun where there are several ranks.
    """
    ranks = learner.parallel.world_size
    world: list[str] = []
    if ranks > 1:
        world = ["-m", "megatron_opd.learner.torchrun", f"--nproc-per-node={ranks}"]
    return [sys.executable, *world, "-m", "megatron_opd.learner", str(config_file), *extra]


class LearnerProcess:
    """Starts and ends one learner world, and sends the output of every rank to `log`.

    log: None: the ranks write to our own output. keys: the ranks' part of the run's; they are
    not on the command line, which anyone on the machine may read. gpus: what CUDA calls those of
    the ranks, in their order; None: those that this process sees.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None,
        threads: int | None,
        keys: RankKeys | None = None,
        gpus: Sequence[str] | None = None,
    ) -> None:
        self.command = list(command)
        self.log = log
        # those of this process are another program's, such as a launcher that started it
        inherited = {key: value for key, value in os.environ.items() if key not in WORLD_VARIABLES}
        self.environment = {
            **inherited,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            PARENT_VARIABLE: str(os.getpid()),
        }
        if gpus is not None:
            self.environment = ON_GPUS | self.environment
            let_see(self.environment, gpus)
        if keys is not None:
            self.environment[RANK_VARIABLE] = keys.text()
        if threads is not None:
            self.environment["OMP_NUM_THREADS"] = str(threads)
        self._process: subprocess.Popen[bytes] | None = None

    def again(self) -> LearnerProcess:
        """Return another world like this one, not started, which writes a log of its own."""
        other = copy.copy(self)
        other._process = None
        other.log = None if self.log is None else next_log(self.log)
        return other

    @property
    def pid(self) -> int:
        """Returns the process id of torchrun or of the only rank, the root of the process tree."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start the world in a process group of its own, so that Ctrl-C reaches only us."""
        with self.log.open("wb") if self.log else contextlib.nullcontext() as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                env=self.environment,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """Return the exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    def cause(self) -> str | None:
        """Return None: the log says which rank ended, and why."""
        return None

    def wait(self) -> int:
        """Block until the root of the process tree ends and return its exit code."""
        assert self._process is not None, "not started"
        return self._process.wait()

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the root, wait `grace_s`, then SIGKILL what is left of its process tree.

        torchrun puts every rank in a session of its own, so the group of torchrun is not enough.
        """
        if self._process is None or self._process.poll() is not None:
            return
        tree = process_tree(self.pid)
        self._process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=grace_s)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=grace_s)
        self._process.wait()


def process_tree(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants that exist now."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
