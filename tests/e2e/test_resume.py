"""A run that is killed or preempted goes on: bitwise the updates that it would have made.

Also which groups it drops for their rewards and which prompts it passes over is the same. Three
attempts. The first is killed, and its servers outlive it with weights of later versions. The
second continues on them and is preempted. The third has a student server of its own. The later two
are evaluated while they train, which changes no update either.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from harness.run_dirs import summary_of, updates_of
from megatron_opd.data.prompts import WHOLE_BYTES
from megatron_opd.metrics.compare import compare_rows
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.conftest import STARTUP_TIMEOUT_S, tiny_spec
from tests.support.preloaded import Program

pytestmark = pytest.mark.e2e

UPDATES, BATCH, EVERY, HELD, GROUP = 11, 4, 5, 1, 2
COMPARED = 4  # updates after the checkpoint; HELD of them on samples that it holds
LIMIT_S = 300


@pytest.fixture
def elsewhere(
    student_model: Path, teacher_model: Path, tmp_path: Path
) -> Iterator[dict[str, dict[str, Any]]]:
    """The sections of servers that outlive the run and serve the one that goes on."""
    models = {"student": student_model, "teacher": teacher_model}
    with ExitStack() as servers:
        specs = [tiny_spec(model, role, deterministic=True) for role, model in models.items()]
        logs = [tmp_path / f"{role}.log" for role in models]
        both = [ServerProcess(spec, log) for spec, log in zip(specs, logs, strict=True)]
        for server in both:
            servers.callback(server.stop, grace_s=1)
            server.start()
        for server in both:
            server.wait_ready(STARTUP_TIMEOUT_S)
        yield {
            role: {"model": str(model), "dtype": "float32", "urls": [server.spec.url]}
            for (role, model), server in zip(models.items(), both, strict=True)
        }


def write_config(root: Path, elsewhere: dict[str, dict[str, Any]]) -> Path:
    """A run that can be repeated. Its rows are read when they are drawn, for the file is large."""
    weights = ({"kl": 0}, {"own": 0}, {"own": 0.5, "kl": 2})
    rows = [{"prompt": f"{i}+{i}=", "answer": "x"} | weights[i % 3] for i in range(15)]
    rows[5:5] = rows[9:9] = [{"prompt": ""}]
    unread = {"notes": "x" * (WHOLE_BYTES // len(rows))}
    lines = [json.dumps(row | unread) for row in rows]
    terms = [{"objective": {"type": "reverse_kl"}}, {"objective": {"type": "grpo"}}]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    server = {"dtype": "float32", "max_total_tokens": 8192, "context_length": 256}
    tree: dict[str, Any] = {
        "run": {"dir": str(root / "run"), "max_steps": UPDATES, "seed": 3, "deterministic": True},
        "data": {
            "train": str(root / "train.jsonl"),
            "task": "tests.support.verdicts:is_of_even_length",
            "max_bad_fraction": 0.5,
            "reward_weight_key": "own",
            "teacher_weight_key": "kl",
            "curriculum": {"type": "pass_rate", "low": 0.4, "high": 0.6, "outside": 0.3},
        },
        "student": {**server, **elsewhere["student"]},
        "teacher": elsewhere["teacher"],
        "rollout": {"max_new_tokens": 24, "concurrency": 12, "group_size": GROUP},
        "support": {"type": "mc", "m": 8},
        "objective": {"type": "mixture", "terms": terms},
        "selection": {
            "groups": {"type": "reward_spread", "most_in_a_row": 2, "exhausted": "keep"},
        },
        "buffer": {"batch_size": BATCH},
        "schedule": {"type": "controlled", "max_staleness": HELD},
        "learner": {
            "dtype": "float32",
            "max_tokens_per_microbatch": 256,
            "threads": 1,
            "optimizer": {"lr": 0.001},
        },
        "checkpoint": {"every": EVERY, "export_hf": False},
        "evaluation": {"problems": 0},
        "scoring": {"guard": "off"},
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
    return Program(
        [sys.executable, "-m", "megatron_opd", "run", str(config), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def newest_in(run_dir: Path) -> int:
    """Updates of the newest complete checkpoint; 0 without one."""
    found = run_dir.glob("checkpoints/step-??????")
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def wait_until(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_rows(before: list[dict[str, Any]], after: list[dict[str, Any]], newest: int) -> None:
    """What was learnt is what an undisturbed run learns. newest: the first checkpoint's updates."""
    assert [row["update"] for row in after] == list(range(UPDATES))
    assert [row["version"] for row in after] == list(range(UPDATES))
    # with other requests in flight than the first time
    found = compare_rows(before, after)
    assert found.updates >= newest + COMPARED
    assert {"loss", "grad_norm", "num_ids", "ratio_max", "lr"} <= set(found.columns)
    assert {"groups_all_right", "reward_sampled_mean", "curriculum_skipped"} <= set(found.columns)
    assert found.differences == ()
    assert after[-1]["time_s"] > before[newest - 1]["time_s"]


def check_summary(run_dir: Path, resumed_at: list[int]) -> None:
    """Totals go on over every process of the run."""
    after, summary = updates_of(run_dir), summary_of(run_dir)
    assert summary["status"] == "finished"
    assert summary["resumed_at_updates"] == resumed_at
    assert summary["updates"] == summary["version"] == UPDATES
    assert summary["samples_consumed"] == UPDATES * BATCH
    dropped = summary["samples_dropped"]
    assert set(dropped) == {"all_right", "all_wrong"}, "groups that taught nothing"
    assert summary["samples_admitted"] == UPDATES * BATCH + sum(dropped.values())
    assert after[-1]["curriculum_skipped"] > 0
    assert summary["samples_in_flight"] == 0
    tokens = sum(row["num_response_tokens"] for row in after)
    assert sum(summary["staleness_tokens_by_version"].values()) == tokens, "totals go on"
    assert summary["staleness_max_versions"] <= HELD
    kept = sorted(path.name for path in run_dir.glob("checkpoints/step-*"))
    assert kept == [f"step-{updates:06d}" for updates in (UPDATES - 1, UPDATES)]
    assert (run_dir / "earlier" / "1" / "logs" / "learner.log").exists()


def check_evaluations(run_dir: Path, newest: int, preempted_at: int) -> None:
    """Every update since the first checkpoint is evaluated once, or counted as skipped."""
    summary = summary_of(run_dir)
    lines = (run_dir / "evaluations.jsonl").read_text().splitlines()
    places = [json.loads(line)["update"] for line in lines]
    assert places == sorted(set(places)), "none twice, also of those that were interrupted"
    assert newest < places[0]
    assert preempted_at in places
    assert places[-1] == UPDATES
    assert len(places) + summary["evaluations_skipped"] == UPDATES - newest, "none left out"


def test_a_run_that_is_killed_and_preempted_goes_on(
    tmp_path: Path,
    elsewhere: dict[str, dict[str, Any]],
    processes: list[subprocess.Popen[str]],
) -> None:
    """Before: the student server was refused, as it held weights of another run."""
    config, run_dir = write_config(tmp_path, elsewhere), tmp_path / "run"
    first = start(config, "--auto-resume")
    processes.append(first)
    wait_until(first, lambda: 0 < newest_in(run_dir) <= len(updates_of(run_dir)) - COMPARED)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    left = psutil.wait_procs(children, timeout=20)[1]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE], "children outlive the run"
    before = updates_of(run_dir)
    newest = newest_in(run_dir)
    torn = run_dir / "checkpoints" / "step-000099.part"
    (torn / "learner").mkdir(parents=True)

    held = f"data.heldout={{few: {tmp_path / 'train.jsonl'}}}"
    evaluated = ["--set", held, "--set", "evaluation={problems: 3, samples: 2, every: 1}"]
    second = start(config, "--auto-resume", "--set", "checkpoint.every=1000", *evaluated)
    processes.append(second)
    wait_until(second, lambda: not torn.exists() and len(updates_of(run_dir)) > newest)
    second.send_signal(signal.SIGUSR1)
    output = second.communicate(timeout=LIMIT_S)[0]
    assert second.returncode == os.EX_TEMPFAIL, output
    assert f"{torn.name} was not written completely and is ignored" in output
    resumed = f"continuing from {run_dir / 'checkpoints'}/step-{newest:06d} ({newest} updates)"
    assert resumed in output
    assert "SIGUSR1: the run ends after a checkpoint, within 120 s" in output
    assert "preempted: SIGUSR1\n" in output
    preempted_at = newest_in(run_dir)
    assert newest < preempted_at < UPDATES
    summary = summary_of(run_dir)
    assert (summary["status"], summary["updates"]) == ("preempted", preempted_at)
    after = updates_of(run_dir)
    assert after[:newest] == before[:newest], "what was made before the checkpoint stands"

    # a checkpoint after every update, by the clock: it must not change what is learnt
    options = ["--set", "rollout.concurrency=3", "--set", "checkpoint.every_minutes=1e-6"]
    third = start(config, "--auto-resume", *options, "--set", "student.urls=[]", *evaluated)
    processes.append(third)
    output = third.communicate(timeout=LIMIT_S)[0]
    assert third.returncode == 0, output

    check_rows(before, updates_of(run_dir), newest)
    check_summary(run_dir, [newest, preempted_at])
    check_evaluations(run_dir, newest, preempted_at)

    done = subprocess.run(
        [sys.executable, "-m", "megatron_opd", "run", str(config), "--auto-resume"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"run.dir {run_dir}: the run is finished\n")
