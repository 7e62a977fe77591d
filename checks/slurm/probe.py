"""What the launcher does inside a job, found out there: `python -m checks.slurm.probe OUT`.

A process is lost in every way in which it can be; each time it is timed how long something of it is
left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megatron_opd.launch.launcher import Need, NodePlace, ProcessSpec
from megatron_opd.launch.slurm import SlurmLauncher
from megatron_opd.launch.slurm_process import SlurmProcess
from tests.support.trees import lives

NEEDS = (
    Need("learner", 0, 2),
    Need("student", 0, 2),
    Need("student", 1, 2),
    Need("teacher", 0, 2),
)
# Prints what it sees. Its child is in a session of its own, as a learner's rank is, heeds no
# SIGTERM, as a hung one does not, and looks after its parent, as a server does.
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    time.sleep(0.1)
"""
PROGRAM = f"""
import json, os, subprocess, sys, time
piped = {{"stdout": subprocess.PIPE, "start_new_session": True}}
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], **piped)
child.stdout.readline()
names = ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "SECRET")
seen = {{name: os.environ.get(name) for name in names}}
seen |= {{"pids": [os.getpid(), child.pid], "step": os.getppid()}}
print(json.dumps(seen), flush=True)
time.sleep(600)
"""
STEP = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gpus-per-node=2", "--exact"]
SHOW = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES; sleep 2"]
LONGEST_S = 60.0


class Probe:
    """Runs the scenarios one after the other, in the job that this process is in."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.launcher, self.started = logs, SlurmLauncher(), 0
        self.said: list[str] = []

    def start(self, place: NodePlace) -> tuple[SlurmProcess, dict[str, Any]]:
        """Start the program at a place; what it saw there."""
        self.started += 1
        log = self.logs / f"{self.started}.{place.need.key}{place.need.index}.log"
        spec = ProcessSpec(log.stem, ("-c", PROGRAM), {"SECRET": "hidden"}, log)
        process = self.launcher.process(spec, place)
        process.start()
        return process, read_line(log)

    def run(self) -> dict[str, Any]:
        """Every scenario's figures."""
        places = self.launcher.reserve(NEEDS, self.said.append)
        running = [self.start(place) for place in places]
        found: dict[str, Any] = {"host": self.launcher.host, "reserved": self.said[0]}
        found["processes"] = [
            {
                "what": f"{place.need.key} {place.need.index}",
                "address": f"{place.host}:{place.port}",
                "node": seen["SLURMD_NODENAME"],
                "gpus": seen["CUDA_VISIBLE_DEVICES"],
                "secret_on_a_command_line": on_a_command_line("hidden"),
            }
            for place, (_, seen) in zip(places, running, strict=True)
        ]
        learner, student, second, teacher = running
        found["stop"] = timed(lambda: student[0].stop(1.0), student[1])
        found["stop"]["exit_code"] = student[0].exit_code()
        found["srun_killed"] = timed(lambda: kill_srun(second[0]), second[1])
        second[0].stop(1.0)
        found["step_killed"] = timed(lambda: os.kill(teacher[1]["step"], 9), teacher[1])
        found["step_killed"]["exit_code"] = ended(teacher[0])
        found["step_stopped"] = timed(lambda: stop_stopped(*learner), learner[1])
        found["controller_killed"] = self.controller_killed()
        found["node_lost"] = self.node_lost(places[3])
        node = f"--nodelist={self.launcher.nodes[1].name}"
        found["two_steps_of_two_gpus_by_srun_exact"] = by_slurm(node)
        found["two_steps_of_two_gpus_by_srun_exact_overlap"] = by_slurm(node, "--overlap")
        self.launcher.close()
        return found

    def controller_killed(self) -> dict[str, Any]:
        """Kill a launcher's process; its process on a node."""
        log = self.logs / "controller.log"
        command = [sys.executable, "-m", "checks.slurm.probe", "--controller", str(log)]
        controller = subprocess.Popen(command)
        seen = read_line(log)
        found = timed(controller.kill, seen)
        controller.wait()
        return found

    def node_lost(self, place: NodePlace) -> dict[str, Any]:
        """Kill everything on a node, and start again what ran there."""
        process, seen = self.start(place)
        lost_s = time.monotonic()
        for pid in [slurmd_of(place.node), psutil.Process(seen["step"]).ppid(), *everything(seen)]:
            os.kill(pid, signal.SIGKILL)
        down = ["scontrol", "update", f"nodename={place.node}", "state=down", "reason=lost"]
        subprocess.run(down, check=True)
        code = ended(process)
        found = {"was_on": place.node, "noticed_s": since(lost_s), "exit_code": code}
        process.stop(1.0)
        moved = self.launcher.replace(place, self.said.append)
        again, seen = self.start(moved)
        found |= {"said": self.said[-1], "is_on": seen["SLURMD_NODENAME"]}
        found |= {"gpus": seen["CUDA_VISIBLE_DEVICES"], "again_after_s": since(lost_s)}
        again.stop(1.0)
        return found


def by_slurm(*options: str) -> list[str]:
    """What Slurm gives to two steps at a time, each of which asks for two GPUs of a node."""
    command = [*STEP, *options, *SHOW]
    steps = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return [step.communicate()[0].strip() for step in steps]


def since(start_s: float) -> float:
    """Seconds since then."""
    return round(time.monotonic() - start_s, 2)


def everything(seen: dict[str, Any]) -> list[int]:
    """The processes on the node."""
    return [seen["step"], *seen["pids"]]


def timed(act: Callable[[], Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Act; how long until nothing of a process is left on its node, and what then is."""
    start_s = time.monotonic()
    act()
    left = everything(seen)
    while left and time.monotonic() - start_s < LONGEST_S:
        time.sleep(0.05)
        left = [pid for pid in left if lives(pid)]
    return {"gone_after_s": since(start_s), "processes_left": len(left)}


def kill_srun(process: SlurmProcess) -> None:
    """Kill srun alone."""
    assert process._srun is not None
    process._srun.kill()


def stop_stopped(process: SlurmProcess, seen: dict[str, Any]) -> None:
    """End a step that stands still and does not hear."""
    os.kill(seen["step"], signal.SIGSTOP)
    process.stop(1.0)


def ended(process: SlurmProcess) -> int | None:
    """Wait for its end; its exit code, None if it does not end."""
    deadline_s = time.monotonic() + LONGEST_S
    while process.exit_code() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return process.exit_code()


def read_line(log: Path) -> dict[str, Any]:
    """What the program wrote."""
    deadline_s = time.monotonic() + LONGEST_S
    while True:
        lines = log.read_text().splitlines() if log.exists() else []
        found = [line for line in lines if line.startswith("{") and line.endswith("}")]
        if found:
            return json.loads(found[0])
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"nothing in {log}: {lines}")
        time.sleep(0.05)


def on_a_command_line(word: str) -> bool:
    """Whether any process of this machine shows it."""
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return any(word in " ".join(line) for line in lines if "-c" not in line)


def slurmd_of(node: str) -> int:
    """The daemon's process id."""
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[:4] == ["slurmd", "-D", "-N", node]:
            return process.pid
    raise RuntimeError(f"no slurmd of {node}")


def controller(log: Path) -> None:
    """Start the program and wait to be killed."""
    launcher = SlurmLauncher()
    (place,) = launcher.reserve([Need("student", 0, 1)], print)
    spec = ProcessSpec("student 0", ("-c", PROGRAM), {}, log)
    launcher.process(spec, place).start()
    time.sleep(600)


if __name__ == "__main__":
    if sys.argv[1] == "--controller":
        controller(Path(sys.argv[2]))
    out = Path(sys.argv[1])
    facts = Probe(out.parent).run()
    out.write_text(json.dumps(facts, indent=2))
