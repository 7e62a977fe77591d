"""A real Slurm on this machine: one slurmd a node, each with GPUs that are none.

Debian's slurm-wlm and munge are enough; it listens on loopback and lies in one folder. The nodes
share the machine's address, which makes ports the hard case.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
SYSTEM = "/usr/sbin:/sbin"
FIRST_PORT = 16_800
UP_S = 60.0

CONF = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=5,sched_interval=5
GresTypes=gpu
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=10
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Gres=gpu:{gpus}"


def missing() -> list[str]:
    """What of Slurm is not installed here."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def write_program(path: Path, text: str) -> None:
    """Write a file that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _path() -> str:
    return f"{os.environ['PATH']}:{SYSTEM}"


class OneMachine:
    """Starts Slurm's daemons as children, and ends them. names: of its nodes."""

    def __init__(self, folder: Path, nodes: int, gpus: int) -> None:
        self.folder, self.gpus = folder, gpus
        self.names = [f"n{i + 1}" for i in range(nodes)]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": f"{folder}/slurm.conf"}

    def __enter__(self) -> OneMachine:
        self._configure()
        try:
            munge = ["--key-file", "munge.key", "--socket", "munge.socket", "--pid-file"]
            munge += ["munged.pid", "--log-file", "munged.log", "--seed-file", "munged.seed"]
            paths = [word if word.startswith("--") else f"{self.folder}/{word}" for word in munge]
            self._start("munged", ["munged", "--foreground", "--num-threads=2", *paths])
            self._await(lambda: (self.folder / "munge.socket").exists())
            self._start("slurmctld", ["slurmctld", "-D", "-i"])
            for name in self.names:
                self._start(name, ["slurmd", "-D", "-N", name])
            self._await(lambda: self.ask("sinfo", "-hN", "-o", "%T").split() == self._all("idle"))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *command: str) -> str:
        """What one of Slurm's programs prints; nothing while its daemons do not answer."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout

    def submit(self, *arguments: str | Path, **environment: str) -> str:
        """Submit a job; its id."""
        command = ["sbatch", "--parsable", *map(str, arguments)]
        env = self.environment | environment
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """A job's state, such as RUNNING."""
        words = self.ask("scontrol", "-o", "show", "job", job).split()
        return next((w[9:] for w in words if w.startswith("JobState=")), "GONE")

    def ended(self, job: str, timeout_s: float) -> str:
        """Wait for a job's end; its state."""
        running = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"}
        self._await(lambda: self.state(job) not in running, timeout_s)
        return self.state(job)

    @contextmanager
    def occupied(self, node: str, gpus: int) -> Iterator[str]:
        """Let another job hold GPUs of a node, the first ones."""
        wanted = ["-w", node, f"--gpus-per-node={gpus}", "-c1", "-o", "/dev/null"]
        job = self.submit(*wanted, "--wrap=sleep 3600")
        self._await(lambda: self.state(job) == "RUNNING")
        try:
            yield job
        finally:
            self.ask("scancel", job)

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # or munged refuses
        for name in ("state", *(f"spool/{name}" for name in self.names)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge.key").write_bytes(os.urandom(64))
        (self.folder / "munge.key").chmod(0o600)
        host, ports = socket.gethostname(), _free_ports(len(self.names) + 1)
        nodes = "\n".join(
            NODE.format(name=name, host=host, port=port, gpus=self.gpus)
            for name, port in zip(self.names, ports[1:], strict=True)
        )
        text = CONF.format(host=host, port=ports[0], folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        # Slurm only looks whether these are devices
        gres = f"Name=gpu File=/dev/tty[0-{self.gpus - 1}]"
        text = f"NodeName={','.join(self.names)} {gres}\n"
        (self.folder / "gres.conf").write_text(text)

    def _all(self, state: str) -> list[str]:
        return [state] * len(self.names)

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("wb") as log:
            self.daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _await(self, there: object, timeout_s: float = UP_S) -> None:
        assert callable(there)
        deadline_s = time.monotonic() + timeout_s
        while not there():
            for name, daemon in self.daemons.items():
                if daemon.poll() not in (None, -9):  # -9: a node that a scenario lost
                    raise RuntimeError(f"{name} has ended; see {self.folder}/{name}.out")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"Slurm was not ready within {timeout_s:g} s; see {self.folder}")
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    port = FIRST_PORT
    while len(found) < count:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
                found.append(port)
            except OSError:  # another Slurm's
                pass
        port += 1
    return found
