"""`opd run` as a user runs it: a process of its own, real engines, the files it leaves behind."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_opd.checkpoint.run_lock import LOCK
from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import WeightPiece
from tests.e2e.conftest import Sections
from tests.e2e.weight_sync import differing, give, load_tensors
from tests.support.figures import bounded
from tests.support.paths import ROOT
from tests.support.sockets import listening

pytestmark = pytest.mark.e2e

MISMATCH = "opd run: max |p_learner - p_sampler|"
UPDATES, BATCH, STALENESS = 4, 8, 1
ARITHMETIC = ROOT / "examples" / "arithmetic"
START_TIMEOUT_S = 240
STOP_LIMIT_S = 15


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


@pytest.fixture(scope="module")
def inputs(
    student_model: Path, teacher_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    root = tmp_path_factory.mktemp("run-inputs")
    (root / "student").symlink_to(student_model)
    (root / "teacher").symlink_to(teacher_model)
    lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(16)]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    return root


def write_config(inputs: Path, tmp_path: Path, **sections: dict | None) -> Path:
    """A small run; `sections` replace single keys of its sections, or a whole one that has a type.

    None: no such section.
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
        "buffer": {"batch_size": BATCH, "max_staleness": STALENESS},
        "learner": {
            "dtype": "float32",
            "max_tokens_per_microbatch": 256,
            "threads": 1,
            "optimizer": {"lr": 0.001},
        },
        "evaluation": {"problems": 2, "samples": 2},
        "weight_sync": {"bucket_bytes": 200_000},
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

    def finish(self, timeout_s: float) -> Finished:
        output = self.process.communicate(timeout=timeout_s)[0]
        alive = psutil.wait_procs(list(self.seen), timeout=2)[1]
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], "processes are left"
        return Finished(self.run_dir, self.process.returncode, output)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(config: Path) -> Running:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_opd", "run", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        started.append(Running(process, tmp_path / "run", set()))
        return started[-1]

    yield begin
    for running in started:  # after a failed test
        if running.process.poll() is None:
            running.look()
            running.process.kill()
            for child in running.seen:
                if child.is_running():
                    child.kill()


def test_a_whole_run_and_its_products(inputs: Path, tmp_path: Path, start: Callable[..., Running]):
    running = start(write_config(inputs, tmp_path, weight_sync={"overlap": True, "staging": True}))
    running.wait_until(running.has_updated)
    doors = listening(running.process.pid)
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    # servers, their schedulers' stores, torchrun's store, gloo, the weights' store, our own socket
    assert len(doors) > 5
    assert [door for door in doors if door[0] != "127.0.0.1"] == [], "open to other machines"
    summary = done.summary
    assert summary["status"] == "finished"
    assert summary["frames_refused"] == 0
    assert summary["resumed_with_changes"] == []
    assert not (done.run_dir / LOCK).exists()
    assert summary["updates"] == summary["version"] == len(done.rows) == UPDATES
    assert summary["samples_consumed"] == summary["samples_admitted"] == UPDATES * BATCH
    assert summary["samples_dropped"] == {}
    assert summary["samples_in_flight"] == summary["aborted_requests"] == 0
    # later batches were sampled while the learner trained: the run was asynchronous, and bounded
    assert summary["staleness_bound_versions"] == STALENESS
    assert summary["staleness_max_versions"] == STALENESS
    assert summary["mismatch_tokens"] > 0
    assert summary["probs_diff_max"] > 0
    bounded(MISMATCH, summary["probs_diff_max"], 1e-4)
    assert 0 < summary["overlap"] <= 3
    for key in ("student_accuracy_before_pct", "student_accuracy_after_pct"):
        assert 0 <= summary[key] <= 100
    assert all(abs(row["loss"] - row["reverse_kl_nats"]) < 1e-5 for row in done.rows)
    assert "scores agree with sampling" in done.output
    assert all(row["teacher_near_uniform_fraction"] < 0.1 for row in done.rows)
    assert all(row["teacher_score_std_nats"] > 1 for row in done.rows)
    assert all(row["staleness_max_versions"] <= STALENESS for row in done.rows)
    # every version was sent by threads of the learner's ranks, and came
    assert [row["update"] for row in done.rows] == list(range(UPDATES))
    assert all(row["publish_tries"] == 1 for row in done.rows)
    assert all(row["learner_held_s"] > 0 for row in done.rows)
    assert summary["learner_held_s_mean"] > 0

    run_dir = done.run_dir
    final = run_dir / "checkpoints" / "final"
    AutoModelForCausalLM.from_pretrained(final)
    before = load_file(inputs / "student" / "model.safetensors")
    after = load_file(final / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not before[name].equal(after[name])}
    assert len(moved) > 0.9 * len(before), "training moves (almost) every tensor"

    events = json.loads((run_dir / "trace.json").read_text())
    rows = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"teacher scoring", "learner", "weight sync"} <= rows
    assert sum(e["ph"] == "X" and e["name"].startswith("update") for e in events) == UPDATES
    phases = [e["name"] for e in events if e["ph"] == "X"]
    assert phases.count("start") == phases.count("stage") == UPDATES
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert {path.name for path in (run_dir / "logs").iterdir()} == {
        "learner.log",
        "student-0.log",
        "teacher-0.log",
    }


def test_rewards_alone_need_no_teacher(inputs: Path, tmp_path: Path, start: Callable[..., Running]):
    """GRPO on the arithmetic example; warm enough that the answers to one prompt differ."""
    config = write_config(
        inputs,
        tmp_path,
        data={"train": str(ARITHMETIC / "train.jsonl"), "task": "arithmetic"},
        student={"model": str(ARITHMETIC / "student")},
        teacher=None,
        support={"type": "path"},
        objective={"type": "grpo"},
        rollout={"group_size": 4, "max_new_tokens": 64, "temperature": 1.4},
        buffer={"batch_size": 16},
        evaluation={"problems": 0},
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    assert {path.name for path in (done.run_dir / "logs").iterdir()} == {
        "learner.log",
        "student-0.log",
    }
    summary = done.summary
    assert summary["samples_consumed"] == UPDATES * 16
    assert 0 < summary["reward_mean"] < 1
    assert summary["reward_uniform_group_fraction"] < 1, "some group has something to teach"
    assert summary["cached_ids_per_token"] == summary["distinct_ids_per_token"] == 1
    assert summary["teacher_accuracy_pct"] is None
    assert all("reverse_kl_nats" not in row for row in done.rows)
    moving = [row["grad_norm"] > 0 for row in done.rows]
    assert moving == [row["reward_uniform_group_fraction"] < 1 for row in done.rows]
    bounded(MISMATCH, summary["probs_diff_max"], 1e-4, "grpo")


def test_two_teachers_choose_the_ids(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """Every prompt is scored by the teacher that its row names, on ids that this one selects.

    The run starts the second teacher only; the other servers were there. Each learner rank trains
    on its part of the batch.
    """
    parallel = {"dp": 2}
    rows = [{"prompt": f"{i}+{i}=", "by": ("teacher", "twin")[i % 2]} for i in range(16)]
    data = tmp_path / "named.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    twin = {"model": str(inputs / "student"), "dtype": "float32", "max_total_tokens": 8192}
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 2},
        data={"train": str(data), "teacher_key": "by"},
        teachers={"twin": {**twin, "context_length": 256}},
        learner={"parallel": parallel},
        support={"type": "teacher_topk", "k": 8},
        objective={"type": "forward_kl"},
        **shared,
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    matched(done, 2, parallel)
    summary = done.summary
    assert set(summary["teacher_accuracy_pct_by_name"]) == {"teacher", "twin"}
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert logs == {"learner.log", "teacher-twin-0.log"}
    assert summary["samples_dropped"] == {}
    assert summary["distinct_ids_per_token"] == 8
    assert 8 <= summary["cached_ids_per_token"] <= 9
    assert all(row["loss"] > 0 for row in done.rows)
    assert {"teacher_score_mean_nats/teacher", "teacher_score_mean_nats/twin"} <= set(done.rows[0])


def test_a_teacher_that_answers_nonsense_is_refused(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """A head of zeros: every score is -ln V, finite and the same; the run would look healthy.

    The run that goes on all the same has its layers on two learner ranks.
    """
    parallel = {"pp": 2}
    url, tensors = shared["teacher"]["urls"][0], load_tensors(inputs / "teacher")
    nothing = tensors["lm_head.weight"] * 0
    short = {"run": {"max_steps": 2}, "evaluation": {"problems": 0}, **shared}
    asyncio.run(give(url, tensors | {"lm_head.weight": nothing}))
    try:
        config = write_config(inputs, tmp_path, **short)
        refused = start(config).finish(START_TIMEOUT_S)
        more = {"scoring": {"guard": "warn"}, "learner": {"parallel": parallel}}
        overridden = write_config(inputs, tmp_path, **more, **short)
        shutil.rmtree(tmp_path / "run")
        warned = start(overridden).finish(START_TIMEOUT_S)
    finally:
        asyncio.run(give(url, tensors))
    assert refused.code == 2, refused.output
    (error,) = [line for line in refused.output.splitlines() if line.startswith("error:")]
    for words in (f"teacher at {url} answers nonsense", "-ln 512 = -6.238", "scoring.guard"):
        assert words in error
    assert "Traceback" not in refused.output
    matched(warned, 2, parallel)
    assert f"warning: teacher at {url} answers nonsense" in warned.output
    assert warned.output.count("update 0: teacher 'teacher' answers nonsense") == 1
    assert [row["teacher_near_uniform_fraction"] for row in warned.rows] == [1, 1]


def matched(done: Finished, updates: int, parallel: dict[str, int]) -> None:
    """Assert that a run with this layout of two learner ranks trained and matched the sampler.

    It compared digests after each of its weight syncs, else it would have failed.
    """
    assert done.code == 0, done.output
    assert done.summary["updates"] == updates
    assert done.summary["aborted_requests"] == 0
    assert done.summary["probs_diff_max"] > 0
    bounded(MISMATCH, done.summary["probs_diff_max"], 1e-4, str(parallel))


async def held_by(url: str) -> tuple[int, list[WeightPiece]]:
    """Version and weights of a server."""
    async with ServerClient(url, timeout_s=60) as client:
        return await client.version(), await client.weight_digests()


def test_batches_held_back_have_an_exact_staleness(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """On servers that outlive the run: they keep what two tensor-parallel ranks made."""
    parallel = {"tp": 2}
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 5},
        support={"type": "atoms_tail", "k": 4, "m": 4},
        buffer={"max_staleness": 2, "hold_batches": 2},
        learner={"parallel": parallel},
        evaluation={"problems": 0},
        **shared,
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    matched(done, 5, parallel)
    assert [row["staleness_max_versions"] for row in done.rows] == [0, 1, 2, 2, 2]
    assert [row["staleness_mean_versions"] for row in done.rows] == [0, 1, 2, 2, 2]
    assert done.summary["partial_rollouts"] == 0
    assert 4 < done.summary["distinct_ids_per_token"] <= 8
    version, pieces = asyncio.run(held_by(shared["student"]["urls"][0]))
    assert version == 5
    final = load_file(done.run_dir / "checkpoints" / "final" / "model.safetensors")
    assert {piece.hf_name for piece in pieces} == set(final)
    assert differing(pieces, final) == []
    assert differing(pieces, load_file(inputs / "student" / "model.safetensors")) != []


def kill_a_server(running: Running) -> str:
    """Kill all processes of a server of the run; returns its address."""
    with_us = [process for process in running.seen if process.is_running()]
    server = next(p for p in with_us if "sglang_bridge.server" in p.cmdline())
    arguments = server.cmdline()  # a zombie has none
    os.killpg(server.pid, signal.SIGKILL)
    port = arguments[arguments.index("--port") + 1]
    return f"http://127.0.0.1:{port}"


def test_interrupt_stops_everything_and_keeps_the_summary(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """The student's only server is the run's own, the teacher is not. It is killed before."""
    teacher = shared["teacher"]
    running = start(write_config(inputs, tmp_path, run={"max_steps": 5000}, teacher=teacher))
    running.wait_until(running.has_updated)
    running.look()
    url, updates = kill_a_server(running), running.updates()
    # more than what was sampled already can carry
    running.wait_until(lambda: running.updates() >= updates + 5)
    running.process.send_signal(signal.SIGINT)
    stopped = time.monotonic()
    time.sleep(0.5)
    running.process.send_signal(signal.SIGINT)  # an impatient user changes nothing
    running.process.send_signal(signal.SIGTERM)
    done = running.finish(STOP_LIMIT_S)
    assert time.monotonic() - stopped < STOP_LIMIT_S
    assert done.code == 130, done.output
    assert asyncio.run(held_by(teacher["urls"][0]))[1], "the teacher serves on"
    assert done.summary["status"] == "interrupted"
    assert done.summary["updates"] >= 3
    assert (done.summary["servers_lost"], done.summary["servers_restarted"]) == ({}, 1)
    assert f"student server {url} is lost, the run goes on with 0: " in done.output
    assert f"student server {url} is back after " in done.output
    assert (done.run_dir / "logs" / "student-0.restart1.log").exists()
    accounted = ("samples_consumed", "samples_in_flight")
    assert sum(done.summary[key] for key in accounted) == done.summary["samples_admitted"]
    assert "Traceback" not in done.output


def kill_a_rank(running: Running) -> None:
    """Kill the learner's only rank."""
    running.look()
    with_us = [process for process in running.seen if process.is_running()]  # helpers come and go
    ranks = [p for p in with_us if p.status() != psutil.STATUS_ZOMBIE]
    next(p for p in ranks if "megatron_opd.learner" in p.cmdline()[-5:]).kill()


def test_a_learner_that_is_killed_continues_from_its_checkpoint_and_ends_a_run_without_restarts(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """The student server is the run's own, the teacher is not."""
    running = start(
        write_config(
            inputs,
            tmp_path,
            run={"max_steps": 5000},
            checkpoint={"every": 4, "every_minutes": 0},
            learner={"max_restarts": 1},
            teacher=shared["teacher"],
        )
    )
    running.wait_until(lambda: running.has_updated() and running.updates() >= 6)
    killed_at = running.updates()
    kill_a_rank(running)
    running.wait_until(lambda: (running.run_dir / "logs" / "learner.restart1.log").exists())
    running.wait_until(lambda: running.updates() >= killed_at + 4)
    rows = [json.loads(row) for row in (running.run_dir / "metrics.jsonl").open()]
    assert [row["update"] for row in rows] == list(range(len(rows))), "none is missing or twice"
    # another run must not touch a live one's directory
    second = [sys.executable, "-m", "megatron_opd", "run", str(tmp_path / "config.yaml")]
    refused = subprocess.run([*second, "--overwrite"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"is held by pid {running.process.pid} on " in refused.stderr
    assert running.has_updated()
    kill_a_rank(running)  # its second restart within an hour would be one too many
    done = running.finish(60)
    assert done.code == 1, done.output
    summary = done.summary
    assert (summary["status"], summary["learner_restarts"]) == ("failed", 1)
    assert "learner" in summary["cause"]
    assert 0 <= summary["updates_rolled_back"] < 4 + 4
    drops = sum(summary["samples_dropped"].values())
    assert summary["samples_admitted"] == (
        summary["samples_consumed"] + summary["samples_in_flight"] + drops
    )
    assert "the learner is up, and continues from update " in done.output
    error = [line for line in done.output.splitlines() if line.startswith("error:")]
    assert len(error) == 1
    assert "learner" in error[0]
    assert "Traceback" not in done.output


def test_a_server_that_dies_while_starting_shows_its_log(
    inputs: Path, tmp_path: Path, start: Callable[..., Running]
):
    """The student server is the run's own too: it is ended while it starts."""
    config = write_config(inputs, tmp_path, teacher={"extra_args": ["--load-format", "no-such"]})
    done = start(config).finish(START_TIMEOUT_S)
    assert done.code == 2, done.output
    assert "teacher server" in done.output
    assert "no-such" in done.output
    assert "Traceback" not in done.output.split("error:")[0]
    assert done.summary["status"] == "failed"


def test_two_learner_ranks_with_experts_of_their_own(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """The other axes share a run with another subject: tensors with the exact staleness, data with
    two teachers, layers with a nonsense teacher.
    """
    parallel = {"dp": 2, "ep": 2}
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 2},
        learner={"parallel": parallel},
        evaluation={"problems": 0},
        **shared,
    )
    running = start(config)
    running.wait_until(running.has_updated)
    matched(running.finish(START_TIMEOUT_S), 2, parallel)


def test_eval_of_a_checkpoint(inputs: Path, tmp_path: Path):
    config = write_config(inputs, tmp_path)
    command = [sys.executable, "-m", "megatron_opd", "eval", str(config), "--json"]
    command += ["--model", str(inputs / "student")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["problems"], report["samples"]) == (2, 2)
    assert 0 <= report["accuracy_pct"] <= 100
