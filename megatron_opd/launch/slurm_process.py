"""Runs one process on a node of a Slurm job, as a step of its own.

A child here, srun, holds the step, and the step (step.py) owns the processes on the node. srun
forwards what is written to it: the seconds in which all must have ended. When this program is gone
in whatever way, the pipe to srun ends, and with it the step.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

from megatron_opd.launch.launcher import ProcessSpec
from megatron_opd.launch.parts import Gpus
from megatron_opd.launch.slurm_queries import SlurmNode

STEP_S = 10.0
"""Seconds beyond the grace that a step may take to end its processes and srun to hear of it."""
FORCE_S = 10.0
"""Seconds that srun may take to have Slurm kill a step that does not answer."""


def srun_command(
    job: int, node: SlurmNode, spec: ProcessSpec, gpus: Gpus, python: str = sys.executable
) -> list[str]:
    """Return the command of one step.

    --gpus-per-node: all that the job has there; by itself Slurm gives what the job asked for, and a
    job that has nodes to itself has more. --overlap: steps share the node, and each has all these
    GPUs and all cores; the step itself holds to the GPUs of its process. (Slurm would deal GPUs out
    to steps with --exact and without --overlap, but to its own liking, and cores and memory would
    have to be dealt out too; overlapping steps that ask for two GPUs each get the same two.)
    """
    see = [f"--gpus-per-node={node.gpus}"] if gpus else []
    narrow = ["--gpus", ",".join(map(str, gpus))] if gpus else []
    return [
        "srun",
        f"--jobid={job}",
        f"--job-name=opd-{re.sub('[^A-Za-z0-9_.-]+', '-', spec.name)}",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node.name}",
        *see,
        "--overlap",
        "--export=ALL",  # of our environment, by Slurm's own protocol
        "--cpu-bind=none",
        "--mpi=none",
        python,
        "-m",
        "megatron_opd.launch.step",
        *narrow,
        "--",
        *spec.arguments,
    ]


class SlurmProcess:
    """Starts, watches and stops one step. Its methods may be called from any one thread."""

    def __init__(self, command: Sequence[str], spec: ProcessSpec) -> None:
        self.command, self.spec = list(command), spec
        self._srun: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the step; its output goes to the spec's log."""
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("wb") as log:
            self._srun = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.env},
                start_new_session=True,  # Ctrl-C reaches only us
            )

    def exit_code(self) -> int | None:
        """Return srun's exit code, which is the process's; None while it runs, and before start."""
        return None if self._srun is None else self._srun.poll()

    def cause(self) -> str | None:
        """Return None: what srun says of a lost node is in the log."""
        return None

    def stop(self, grace_s: float) -> None:
        """End the processes of the step: SIGTERM, and SIGKILL after `grace_s`. Safe to repeat.

        A step that does not answer, on a node that is lost or stands still, is Slurm's to kill.
        """
        if self._srun is None:
            return
        srun, orders = self._srun, self._srun.stdin
        assert orders is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended; it was told before
            orders.write(f"{grace_s}\n".encode())
            orders.close()
        for wait_s, number in ((grace_s + STEP_S, signal.SIGTERM), (FORCE_S, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                srun.wait(wait_s)
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(srun.pid, number)  # srun has a helper
        srun.wait()
