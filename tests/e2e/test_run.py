"""`opd run` as a user runs it: a process of its own, real engines, the files it leaves behind."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_opd.checkpoint.run_lock import LOCK
from megatron_opd.wire.keys import KEYS_FILE
from tests.e2e.conftest import Sections, imports_of, report_imports
from tests.e2e.runs import (
    BATCH,
    STALENESS,
    START_TIMEOUT_S,
    UPDATES,
    Finished,
    Running,
    held_by,
    write_config,
)
from tests.e2e.weight_sync import differing, give, load_tensors
from tests.support.figures import bounded
from tests.support.paths import ROOT
from tests.support.preloaded import Program
from tests.support.secrets import all_arguments, found_in, secrets_in
from tests.support.sockets import listening

pytestmark = pytest.mark.e2e

MISMATCH = "opd run: max |p_learner - p_sampler|"
GUARDED = {"guard": "refuse"}
NEVER_IN_A_RANK = ("wandb", "tensorboard", "sglang", "transformers", "ray", "pytest")
SHARED = {"type": "student", "share": 0.5}
AVERAGE = {"type": "ema", "decay": 0.5}
SYNC = {"overlap": True, "staging": True, "same_host": "auto"}


def test_a_whole_run_and_its_products(inputs: Path, tmp_path: Path, start: Callable[..., Running]):
    running = start(write_config(inputs, tmp_path, weight_sync=SYNC, scoring=GUARDED))
    running.wait_until(running.has_updated)
    doors = listening(running.process.pid)
    secrets, arguments = secrets_in(running.run_dir / KEYS_FILE), all_arguments(running.process.pid)
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
    assert not (done.run_dir / KEYS_FILE).exists()
    assert len(secrets) == 4, "two of the learner's wire, one of each role's servers"
    assert found_in(done.run_dir, secrets) == []
    for secret in secrets:
        assert secret not in done.output
        assert secret not in arguments
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
    assert summary["first_mismatch_verdict"] == "within limits"
    assert 0 < summary["first_mismatch_tokens"] <= summary["mismatch_tokens"]
    assert 0 < summary["overlap"] <= 3
    for key in ("student_accuracy_before_pct", "student_accuracy_after_pct"):
        assert 0 <= summary[key] <= 100
    assert all(abs(row["loss"] - row["reverse_kl_nats"]) < 1e-5 for row in done.rows)
    sampled, second, first = summary["teacher_checks"]
    assert sampled.startswith("teacher: scores agree with sampling to ")
    assert second.startswith("teacher: scores agree with transformers to ")
    assert first.startswith("teacher: 16 first responses of the student, ")
    for line in (sampled, second, first):
        assert line in done.output
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


def test_three_teachers_choose_the_ids(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """Every prompt is scored by the teacher that its row names, on ids that this one selects.

    The run starts the second teacher only; the other servers were there. That one is an average of
    the student, which each weight sync compares by digest with what the learner's ranks hold. The
    third is the student itself, on its own servers.
    """
    names = ("teacher", "twin", "itself")
    rows = [{"prompt": f"{i}+{i}=", "by": names[i % 3]} for i in range(15)]
    data = tmp_path / "named.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    twin = {"model": str(inputs / "student"), "dtype": "float32", "max_total_tokens": 8192}
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 2},
        data={"train": str(data), "teacher_key": "by"},
        teachers={
            "twin": {**twin, "context_length": 256, "source": AVERAGE},
            "itself": {"model": str(inputs / "student"), "source": SHARED},
        },
        weight_sync={"verify_every": 1},
        metrics={"rollouts": BATCH},
        support={"type": "teacher_topk", "k": 8},
        objective={"type": "forward_kl"},
        scoring=GUARDED,
        **shared,
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    matched(done, 2, {})
    summary = done.summary
    assert set(summary["teacher_accuracy_pct_by_name"]) == {"teacher", "twin"}
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert logs == {"learner.log", "teacher-twin-0.log"}
    assert summary["samples_dropped"] == {}
    assert summary["distinct_ids_per_token"] == 8
    assert 8 <= summary["cached_ids_per_token"] <= 9
    assert all(row["loss"] > 0 for row in done.rows)
    assert {"teacher_score_mean_nats/teacher", "teacher_score_mean_nats/twin"} <= set(done.rows[0])
    assert all(row["teacher_publish_s"] > 0 for row in done.rows)
    assert done.rows[0]["teacher_staleness_max_versions"] == 0
    rollouts = [json.loads(line) for line in (done.run_dir / "rollouts.jsonl").open()]
    assert len(rollouts) == 2 * BATCH
    assert {row["teacher"] for row in rollouts} == set(names)
    for row in rollouts:
        follows = row["teacher"] != "teacher"
        assert row["teacher_version"] in ((0, 1) if follows else (None,))


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
        config = write_config(inputs, tmp_path, scoring=GUARDED, **short)
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


def test_servers_that_hold_another_model_are_refused_before_the_first_step(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """The experts of one layer in another order: the run would train, away from what is sampled."""
    url, tensors = shared["student"]["urls"][0], load_tensors(inputs / "student")
    moved = {
        re.sub(r"(layers\.1\..*experts\.)(\d)", lambda m: f"{m[1]}{3 - int(m[2])}", name): tensor
        for name, tensor in tensors.items()
    }
    assert moved.keys() == tensors.keys()
    short = {"run": {"max_steps": 1}, "evaluation": {"problems": 0}, **shared}
    asyncio.run(give(url, moved))
    try:
        refused = start(write_config(inputs, tmp_path, **short)).finish(START_TIMEOUT_S)
    finally:
        asyncio.run(give(url, tensors))
    assert refused.code == 2, refused.output
    (error,) = [line for line in refused.output.splitlines() if line.startswith("error:")]
    for words in ("learner.mismatch_limit refuse", "(limit ", "student.extra_args", "opd mismatch"):
        assert words in error
    assert "Traceback" not in refused.output
    assert refused.rows == []
    summary = refused.summary
    assert (summary["status"], summary["updates"]) == ("failed", 0)
    assert summary["first_mismatch_verdict"] == "exceeds limits"
    assert summary["cause"] in error


def matched(done: Finished, updates: int, parallel: dict[str, int]) -> None:
    """Assert that a run with this layout of learner ranks trained and matched the sampler.

    Experts of their own: test_torchrun_scripts.py. It compared digests after each of its weight
    syncs, else it would have failed.
    """
    assert done.code == 0, done.output
    assert done.summary["updates"] == updates
    assert done.summary["aborted_requests"] == 0
    assert done.summary["probs_diff_max"] > 0
    bounded(MISMATCH, done.summary["probs_diff_max"], 1e-4, str(parallel))


@pytest.mark.parametrize(
    ("schedule", "bound", "versions"),
    [
        ({"type": "stale", "sync_every": 2}, 2, {0, 2, 4, 5}),
        ({"type": "partial", "sync_every": 2, "order": "completion"}, 4, {0, 2, 4, 5}),
        ({"type": "partial", "sync_every": 3, "in_flight": "abort"}, 4, {0, 3, 5}),
    ],
    ids=["stale", "completion", "abort"],
)
def test_several_updates_come_before_a_weight_sync(
    schedule: dict[str, Any],
    bound: int,
    versions: set[int],
    inputs: Path,
    tmp_path: Path,
    shared: Sections,
    start: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
):
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 5},
        schedule=schedule,
        weight_sync={"verify_every": 1},
        evaluation={"problems": 0},
        **shared,
    )
    report_imports(monkeypatch, tmp_path)
    running = start(config)
    running.wait_until(running.has_updated)
    (learner,) = running.ranks()
    imported = imports_of({learner}, tmp_path)[str(learner)]
    assert "megatron.core" in imported
    assert {name.partition(".")[0] for name in imported}.isdisjoint(NEVER_IN_A_RANK)
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    summary, rows = done.summary, done.rows
    assert (summary["updates"], summary["version"], summary["samples_in_flight"]) == (5, 5, 0)
    assert summary["samples_consumed"] == 5 * BATCH
    assert summary["staleness_bound_versions"] == bound
    assert summary["staleness_max_versions"] <= bound
    assert {row["update"] + 1 for row in rows if row["publish_s"] is not None} == versions - {0}
    assert [row["version"] for row in rows] == list(range(5))
    if schedule["type"] == "stale":
        assert summary["partial_rollouts"] == 0, "each response is of one version"
    # what was sampled by the learner's own weights was measured, and agrees
    bounded(MISMATCH, summary["probs_diff_max"], 1e-4, schedule["type"])


def test_batches_held_back_have_an_exact_staleness(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """On servers that outlive the run: they keep what two tensor-parallel ranks made."""
    parallel, train = {"tp": 2}, tmp_path / "train.jsonl"
    lines = [json.dumps({"prompt": f"{i}+{i}="}) for i in range(3 * BATCH)]  # as many as in flight
    train.write_text("\n".join(lines) + "\n")
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 5},
        data={"train": str(train)},
        support={"type": "atoms_tail", "k": 4, "m": 4},
        schedule={"type": "controlled", "max_staleness": 2},
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


def test_a_server_that_dies_while_starting_shows_its_log(
    inputs: Path, tmp_path: Path, start: Callable[..., Running]
):
    """The student server is the run's own too: it is ended while it starts."""
    config = write_config(
        inputs, tmp_path, teacher={"extra_args": ["--attention-backend", "no-such"]}
    )
    done = start(config).finish(START_TIMEOUT_S)
    assert done.code == 2, done.output
    assert "teacher server" in done.output
    assert "no-such" in done.output
    assert "Traceback" not in done.output.split("error:")[0]
    assert done.summary["status"] == "failed"


def test_the_example_of_one_node_on_a_cpu(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """Its three learner ranks share mini-batches that three does not divide; fewer samples here."""
    tree = yaml.safe_load((ROOT / "examples" / "cluster" / "one_node" / "config.yaml").read_text())
    sizes = {"max_tokens_per_microbatch": 64, "threads": 1, "optimizer": {"lr": 1e-3}}
    smaller: Sections = {
        "run": {"dir": str(tmp_path / "run"), "max_steps": 2},
        "data": {
            "train": str(inputs / "train.jsonl"),
            "heldout": None,
            "chat_template": False,
            "max_prompt_tokens": 16,
        },
        **{
            role: {"model": str(inputs / role), "dtype": "float32", **shared[role]}
            for role in ("student", "teacher")
        },
        "rollout": {"max_new_tokens": 16, "concurrency": 32},
        "buffer": {"batch_size": 32},
        "learner": {"dtype": "float32", **sizes},
        "evaluation": {"problems": 0},
    }
    for name, values in smaller.items():
        kept = {} if name in ("student", "teacher") else tree[name]
        tree[name] = {**kept, **values}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    matched(done, 2, tree["learner"]["parallel"])
    assert [row["num_samples"] for row in done.rows] == [32, 32]


def test_eval_of_checkpoints(inputs: Path, tmp_path: Path):
    config, out = write_config(inputs, tmp_path), tmp_path / "evaluated.json"
    command = [sys.executable, "-m", "megatron_opd", "eval", str(config), "--out", str(out)]
    command += ["--checkpoints", str(inputs / "student")]
    done = Program(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = done.communicate(timeout=START_TIMEOUT_S)[0]
    assert done.returncode == 0, said
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["checkpoint"], row["updates"]) == (str((inputs / "student").resolve()), None)
    assert (row["set"], row["problems"], row["samples"]) == ("heldout", 2, 2)
    assert 0 <= row["accuracy_pct"] <= row["pass_at_k"]["2"] <= 100
    assert (row["version_min"], row["version_max"]) == (0, 0)
