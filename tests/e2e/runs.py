"""An `opd run` of small models in a process of its own, and what it leaves behind."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import WeightPiece

UPDATES, BATCH, STALENESS = 4, 8, 1
START_TIMEOUT_S = 240


@dataclass(frozen=True)
class Finished:
    """One finished `opd run`."""

    run_dir: Path
    code: int
    output: str

    @property
    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").open()]


def write_prompts(inputs: Path) -> None:
    """Sums, which train and are held out."""
    lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(16)]
    (inputs / "train.jsonl").write_text("\n".join(lines) + "\n")


def write_config(inputs: Path, tmp_path: Path, **sections: dict | None) -> Path:
    """A small run; `sections` replace single keys of its sections, or a whole one that has a type.

    None: no such section. Where the teachers' guard is not what is tested, no other program makes a
    forward pass: importing it costs as much as the learner.
    """
    server = {"dtype": "float32", "max_total_tokens": 8192, "context_length": 256}
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run"), "max_steps": UPDATES, "seed": 3},
        "data": {
            "train": str(inputs / "train.jsonl"),
            "heldout": str(inputs / "train.jsonl"),
            "task": "exact",
        },
        "student": {**server, "model": str(inputs / "student")},
        "teacher": {**server, "model": str(inputs / "teacher")},
        "rollout": {"max_new_tokens": 24, "concurrency": 12},
        "support": {"m": 8},
        "buffer": {"batch_size": BATCH},
        "schedule": {"max_staleness": STALENESS},
        "learner": {
            "dtype": "float32",
            "max_tokens_per_microbatch": 256,
            "threads": 1,
            "optimizer": {"lr": 0.001},
        },
        "evaluation": {"problems": 2, "samples": 2},
        "weight_sync": {"bucket_bytes": 200_000},
        "scoring": {"guard": "off"},
    }
    for name, values in sections.items():
        if values is None or "type" in values:
            tree[name] = values
        else:
            tree[name] = {**tree.get(name, {}), **values}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@dataclass
class Running:
    """A started `opd run` and every process it has had."""

    process: subprocess.Popen[str]
    run_dir: Path
    seen: set[psutil.Process]

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not happened():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "it took too long"
            self.look()
            time.sleep(0.1)

    def look(self) -> None:
        try:
            self.seen.update(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def has_updated(self) -> bool:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_size > 0

    def updates(self) -> int:
        return len((self.run_dir / "metrics.jsonl").read_text().splitlines())

    def ranks(self) -> list[int]:
        """The learner's processes."""
        self.look()
        with_us = [process for process in self.seen if process.is_running()]  # helpers come and go
        alive = [p for p in with_us if p.status() != psutil.STATUS_ZOMBIE]
        return [p.pid for p in alive if "megatron_opd.learner" in p.cmdline()[-5:]]

    def kill_a_rank(self) -> None:
        """Kill the learner's only rank, if it is there."""
        for pid in self.ranks():
            os.kill(pid, signal.SIGKILL)

    def finish(self, timeout_s: float) -> Finished:
        output = self.process.communicate(timeout=timeout_s)[0]
        alive = psutil.wait_procs(list(self.seen), timeout=2)[1]
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], "processes are left"
        return Finished(self.run_dir, self.process.returncode, output)


async def held_by(url: str) -> tuple[int, list[WeightPiece]]:
    """Version and weights of a server."""
    async with ServerClient(url, timeout_s=60) as client:
        return await client.version(), await client.weight_digests()
