"""A run that is killed goes on from its checkpoint: bitwise the updates it would have made."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megatron_opd.metrics.compare import compare_rows
from tests.e2e.conftest import running, tiny_spec

pytestmark = pytest.mark.e2e

UPDATES, BATCH, EVERY, HELD = 11, 4, 5, 1
COMPARED = 4  # updates after the checkpoint; HELD of them on samples that it holds
LIMIT_S = 300


@pytest.fixture
def teacher(teacher_model: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The section of a server that outlives the run and serves the one that goes on."""
    spec = tiny_spec(teacher_model, "teacher", deterministic=True)
    with running(spec, tmp_path / "teacher.log") as process:
        yield {"model": str(teacher_model), "dtype": "float32", "urls": [process.spec.url]}


def write_config(root: Path, student: Path, teacher: dict[str, Any]) -> Path:
    """A run that can be repeated."""
    lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(16)]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    server = {"dtype": "float32", "max_total_tokens": 8192, "context_length": 256}
    tree: dict[str, Any] = {
        "run": {"dir": str(root / "run"), "max_steps": UPDATES, "seed": 3, "deterministic": True},
        "data": {"train": str(root / "train.jsonl"), "task": "exact"},
        "student": {**server, "model": str(student)},
        "teacher": teacher,
        "rollout": {"max_new_tokens": 24, "concurrency": 12},
        "support": {"m": 8},
        "buffer": {"batch_size": BATCH, "max_staleness": HELD, "hold_batches": HELD},
        "learner": {
            "dtype": "float32",
            "max_tokens_per_microbatch": 256,
            "threads": 1,
            "optimizer": {"lr": 0.001},
        },
        "checkpoint": {"every": EVERY, "export_hf": False},
        "evaluation": {"problems": 0},
        "metrics": {"progress": False, "tensorboard": False},
        "weight_sync": {"bucket_bytes": 200_000},
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:  # after a failed test
        if process.poll() is None:
            tree = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in tree:
                if child.is_running():
                    child.kill()


def start(config: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_opd", "run", str(config), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def newest_in(run_dir: Path) -> int:
    """Updates of the newest complete checkpoint; 0 without one."""
    found = run_dir.glob("checkpoints/step-??????")
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def test_a_killed_run_goes_on(
    tmp_path: Path,
    student_model: Path,
    teacher: dict[str, Any],
    processes: list[subprocess.Popen[str]],
) -> None:
    config, run_dir = write_config(tmp_path, student_model, teacher), tmp_path / "run"
    first = start(config)
    processes.append(first)
    deadline = time.monotonic() + LIMIT_S
    while not 0 < newest_in(run_dir) <= len(rows(run_dir)) - COMPARED:
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    left = psutil.wait_procs(children, timeout=20)[1]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE], "children outlive the run"
    before = rows(run_dir)
    newest = newest_in(run_dir)
    torn = run_dir / "checkpoints" / "step-000099.part"
    (torn / "learner").mkdir(parents=True)

    # a checkpoint after every update, by the clock: it must not change what is learnt
    options = ["--set", "rollout.concurrency=3", "--set", "checkpoint.every_minutes=1e-6"]
    second = start(config, "--resume", *options)
    processes.append(second)
    output = second.communicate(timeout=LIMIT_S)[0]
    assert second.returncode == 0, output
    assert f"{torn.name} was not written completely and is ignored" in output
    assert (
        f"continuing from {run_dir / 'checkpoints'}/step-{newest:06d} ({newest} updates)" in output
    )
    assert not torn.exists()

    after = rows(run_dir)
    assert [row["update"] for row in after] == list(range(UPDATES))
    assert [row["version"] for row in after] == list(range(UPDATES))
    assert after[:newest] == before[:newest], "what was made before the checkpoint stands"
    # with other requests in flight than the first time
    found = compare_rows(before, after)
    assert found.updates >= newest + COMPARED
    assert {"loss", "grad_norm", "num_ids", "ratio_max", "lr"} <= set(found.columns)
    assert found.differences == ()
    assert after[-1]["time_s"] > before[newest - 1]["time_s"]

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["resumed_at_updates"] == [newest]
    assert summary["updates"] == summary["version"] == UPDATES
    assert summary["samples_admitted"] == summary["samples_consumed"] == UPDATES * BATCH
    assert summary["samples_in_flight"] == 0
    tokens = sum(row["num_response_tokens"] for row in after)
    assert sum(summary["staleness_tokens_by_version"].values()) == tokens, "totals go on"
    assert summary["staleness_max_versions"] <= HELD
    kept = sorted(path.name for path in run_dir.glob("checkpoints/step-*"))
    assert kept == [f"step-{updates:06d}" for updates in (UPDATES - 1, UPDATES)]
    assert (run_dir / "earlier" / "1" / "logs" / "learner.log").exists()
