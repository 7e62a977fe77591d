"""A fleet that changes while a run is under way: 1 -> 3 -> 2 -> 1 students, and nothing is lost."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from harness.run_dirs import updates_of
from sglang_bridge.ports import free_port
from tests.e2e.conftest import Sections
from tests.e2e.runs import held_by
from tests.e2e.weight_sync import differing, load_tensors
from tests.support.preloaded import Program

pytestmark = pytest.mark.e2e

BATCH, STALENESS = 8, 1
LIMIT_S = 240
OPD = [sys.executable, "-m", "megatron_opd"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def write_config(root: Path, student: Path, teacher: Path, teachers: Sections) -> Path:
    """A run with one student server of its own, that ends when it is told to."""
    lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(16)]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    server = {"dtype": "float32", "max_total_tokens": 8192, "context_length": 256}
    tree: dict[str, Any] = {
        "run": {"dir": str(root / "run"), "max_steps": 5000, "seed": 3},
        "data": {"train": str(root / "train.jsonl"), "task": "exact"},
        "student": {**server, "model": str(student)},
        "teacher": {**server, "model": str(teacher), **teachers["teacher"]},
        "rollout": {"max_new_tokens": 24, "concurrency": 12},
        "support": {"m": 8},
        "buffer": {"batch_size": BATCH},
        "schedule": {"max_staleness": STALENESS},
        "weight_sync": {"relay": True},  # one rank of the learner, chains of one to three servers
        "learner": {
            "dtype": "float32",
            "max_tokens_per_microbatch": 256,
            "threads": 1,
            "optimizer": {"lr": 0.001},
        },
        "evaluation": {"problems": 0},
        "scoring": {"guard": "off"},
        "checkpoint": {"every_minutes": 0, "export_hf": False},
        "metrics": {"progress": False, "tensorboard": False},
        "cluster": {"fleet_file": str(root / "fleet.txt")},
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Run:
    """An `opd run` under way, and a server that `opd serve` starts beside it."""

    def __init__(self, config: Path, port: int) -> None:
        self.dir = config.parent / "run"
        self.log = config.parent / "run.log"
        settings = ["--set", f"student.base_port={port}"]
        serve = [*OPD, "serve", "student", str(config), *settings]
        self.processes = [self._start([*OPD, "run", str(config)], self.log)]
        self.processes.append(self._start(serve, config.parent / "serve.log"))

    def _start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return Program(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    def fleet(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*OPD, "fleet", arguments[0], str(self.dir), *arguments[1:]]
        return subprocess.run(
            command, capture_output=True, text=True, env=ENVIRONMENT, timeout=LIMIT_S
        )

    def refused(self, *arguments: str) -> str:
        done = self.fleet(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        return line

    def students(self) -> dict[str, dict[str, Any]]:
        rows = json.loads(self.fleet("list", "--json").stdout)
        return {row["url"]: row for row in rows if row["role"] == "student"}

    def rows(self) -> list[dict[str, Any]]:
        return updates_of(self.dir)

    def sampled(self, urls: set[str]) -> bool:
        """Whether just these have the newest version, and each has sampled with some version."""
        rows = self.rows()
        if not rows:
            return False
        live = {url for url, server in rows[-1]["servers"].items() if server["version"] is not None}
        return live == urls and all(rows[-1]["servers"][url]["tokens"] for url in urls)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert self.processes[0].poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def stop(self) -> int:
        self.processes[0].send_signal(signal.SIGINT)
        return self.processes[0].wait(30)


@pytest.fixture
def start(
    student_model: Path, teacher_model: Path, tmp_path: Path, shared: Sections
) -> Iterator[Callable[[int], Run]]:
    started: list[Run] = []

    def begin(port: int) -> Run:
        started.append(Run(write_config(tmp_path, student_model, teacher_model, shared), port))
        return started[-1]

    yield begin
    for run in started:
        for process in run.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in run.processes:
            process.wait(30)


def test_servers_join_and_leave_a_run(
    start: Callable[[int], Run], shared: Sections, student_model: Path, tmp_path: Path
):
    """One joins by command and leaves so; one by the file, once it is up. The run's own ends."""
    lent, teacher = shared["student"]["urls"][0], shared["teacher"]["urls"][0]
    port = free_port()
    served = f"http://127.0.0.1:{port}"
    (tmp_path / "fleet.txt").write_text(f"{served}  # it answers later\n")
    run = start(port)
    run.wait_until(lambda: len(run.rows()) > 0)
    (own,) = run.rows()[0]["servers"].keys() - {served}  # which may be up by then

    assert f"{teacher} is a teacher server of this run already" in run.refused("add", teacher)
    assert "is no server of this run" in run.refused("remove", lent)
    added = run.fleet("add", lent)
    assert added.returncode == 0, added.stderr
    assert "samples once the next weight sync gave it weights" in added.stdout

    run.wait_until(lambda: run.sampled({own, lent, served}))
    students = run.students()
    assert {row["state"] for row in students.values()} == {"serving"}
    assert all(row["tokens_per_s"] is not None for row in students.values())

    removed = run.fleet("remove", lent)
    assert removed.returncode == 0, removed.stderr
    assert "it has its checkpoint's weights again, another run may use it" in removed.stdout
    version, pieces = asyncio.run(held_by(lent))
    assert version == 0
    assert differing(pieces, load_tensors(student_model)) == []

    ended = run.fleet("remove", own)
    assert ended.returncode == 0, ended.stderr
    assert f"student server {own} is removed: it is ended" in ended.stdout
    owned = psutil.Process(run.processes[0].pid).children(recursive=True)
    assert not [p for p in owned if "sglang_bridge.server" in p.cmdline()]
    run.wait_until(lambda: run.sampled({served}))
    (tmp_path / "fleet.txt").write_text("")
    run.wait_until(lambda: "fewer servers than student.min_servers = 1" in run.log.read_text())
    rows = run.rows()
    assert run.stop() == 130, run.log.read_text()

    accounted(run, added=[lent, served], removed=[lent, own])
    assert all(row["staleness_max_versions"] <= STALENESS for row in rows)
    assert all(row["publish_tries"] == 1 for row in rows)
    for row in rows:
        versions = {server["version"] for server in row["servers"].values()} - {None}
        assert versions == {row["version"] + 1}, "what serves has the newest weights"
    assert "no run is under way there" in run.refused("list")


def accounted(run: Run, *, added: list[str], removed: list[str]) -> None:
    """Every prompt is accounted for, and the summary names who came and went."""
    summary = json.loads((run.dir / "summary.json").read_text())
    drops = sum(summary["samples_dropped"].values())
    assert summary["samples_admitted"] == (
        summary["samples_consumed"] + summary["samples_in_flight"] + drops
    )
    assert summary["samples_consumed"] == summary["updates"] * BATCH
    assert (drops, summary["servers_lost"], summary["servers_restarted"]) == (0, {}, 0)
    assert sorted(summary["servers_added"]) == sorted(added)
    assert summary["servers_removed"] == removed
    assert "Traceback" not in run.log.read_text()
