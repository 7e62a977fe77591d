"""Runs of the trained arithmetic models, on servers that they share.

One learns from a mixture of a saved data set and a table, and ends when one of them is used up; one
learns from rewards alone; one plays trajectories of several turns.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from sglang_bridge.server.launch import ServerProcess
from tests.e2e.conftest import STARTUP_TIMEOUT_S, Sections, tiny_spec
from tests.e2e.runs import START_TIMEOUT_S, UPDATES, Finished, Running, write_config
from tests.e2e.weight_sync import rewind
from tests.support.figures import bounded
from tests.support.paths import ROOT

pytestmark = pytest.mark.e2e

ARITHMETIC = ROOT / "examples" / "arithmetic"
ROWS, BATCH, MOST = 24, 8, 20


@pytest.fixture(scope="module")
def servers_of_arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sections]:
    """Both servers, started side by side."""
    logs = tmp_path_factory.mktemp("logs")
    processes = {
        role: ServerProcess(tiny_spec(ARITHMETIC / role, role), logs / f"{role}.log")
        for role in ("student", "teacher")
    }
    try:
        for process in processes.values():
            process.start()
        for process in processes.values():
            process.wait_ready(STARTUP_TIMEOUT_S)
        yield {
            role: {"model": str(ARITHMETIC / role), "urls": [process.spec.url]}
            for role, process in processes.items()
        }
    finally:
        for process in processes.values():
            process.stop(grace_s=1)


@pytest.fixture
def arithmetic(servers_of_arithmetic: Sections) -> Sections:
    """The sections of both roles; the student's server holds what it was started with."""
    asyncio.run(rewind(servers_of_arithmetic["student"]["urls"][0], ARITHMETIC / "student"))
    return servers_of_arithmetic


def write_sources(root: Path) -> list[dict[str, object]]:
    """Chats that end before the result, saved as `datasets` does; and short rows as a table."""
    lines = (ARITHMETIC / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[: 2 * ROWS]]
    chats = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "answer": row["answer"],
            "ends": ["\n#"],
        }
        for row in rows[:ROWS]
    ]
    (root / "chats").mkdir()
    table = pyarrow.Table.from_pylist(chats)
    with pyarrow.ipc.new_stream(root / "chats" / "data.arrow", table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (root / "chats" / "state.json").write_text(json.dumps(state))
    short = [{"prompt": row["prompt"], "answer": row["answer"], "most": 8} for row in rows[ROWS:]]
    parquet.write_table(pyarrow.Table.from_pylist(short), root / "short.parquet")
    return [
        {"path": str(root / "chats"), "weight": 2},
        {"path": str(root / "short.parquet"), "weight": 1},
    ]


def check(done: Finished, updates_before: int, epochs: int) -> int:
    """What both attempts leave behind; returns the updates made."""
    assert done.code == 0, done.output
    summary = done.summary
    updates = summary["updates"]
    assert summary["status"] == "finished"
    assert updates_before < updates < MOST
    assert summary["version"] == updates == len(done.rows)
    assert f"data.train is used up after {updates} updates: data.epochs {epochs}" in done.output
    assert summary["samples_consumed"] == updates * BATCH
    assert set(summary["samples_dropped"]) <= {"incomplete_batch"}
    assert summary["samples_in_flight"] == 0
    assert max(summary["data_epochs"].values()) == epochs
    assert (done.run_dir / "checkpoints" / f"step-{updates:06d}").is_dir()
    return updates


def test_a_run_ends_with_its_data_and_goes_on_with_more_epochs(
    inputs: Path, tmp_path: Path, arithmetic: Sections, start: Callable[..., Running]
):
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": MOST},
        data={
            "train": write_sources(tmp_path),
            "task": "arithmetic",
            "chat_template": True,
            "epochs": 1,
            "stop_key": "ends",
            "max_new_tokens_key": "most",
        },
        **arithmetic,
        rollout={"max_new_tokens": 64},
        buffer={"batch_size": BATCH},
        evaluation={"problems": 0},
        checkpoint={"export_hf": False},
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    updates = check(done, 0, 1)
    assert f"note: data.train lasts for {updates} updates with data.epochs 1" in done.output
    # of the chats most end before their result, every short row is cut at its own limit
    read = done.summary["data_epochs"]
    short = read[str(tmp_path / "short.parquet")] * ROWS
    assert done.summary["length_stops"] >= short - BATCH
    assert done.summary["stop_string_stops"] >= ROWS // 2

    opd = [sys.executable, "-m", "megatron_opd", "run", str(config), "--resume"]
    again = subprocess.run(opd, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "data.epochs must be above 1, as the data was used up" in again.stderr
    more = [*opd, "--set", "data.epochs=2"]
    ended = subprocess.run(
        more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    check(Finished(tmp_path / "run", ended.returncode, ended.stdout), updates, 2)


def test_rewards_alone_need_no_teacher(
    inputs: Path, tmp_path: Path, arithmetic: Sections, start: Callable[..., Running]
):
    """GRPO on the arithmetic example; warm enough that the answers to one prompt differ."""
    config = write_config(
        inputs,
        tmp_path,
        data={"train": str(ARITHMETIC / "train.jsonl"), "task": "arithmetic"},
        student=arithmetic["student"],
        teacher=None,
        support={"type": "path"},
        objective={"type": "grpo"},
        rollout={"group_size": 8, "max_new_tokens": 64, "temperature": 1.6},
        buffer={"batch_size": 32},
        evaluation={"problems": 0},
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    assert {path.name for path in (done.run_dir / "logs").iterdir()} == {"learner.log"}
    summary = done.summary
    assert summary["samples_consumed"] == UPDATES * 32
    assert 0 < summary["reward_mean"] < 1
    assert summary["reward_uniform_group_fraction"] < 1, "some group has something to teach"
    assert summary["cached_ids_per_token"] == summary["distinct_ids_per_token"] == 1
    assert summary["teacher_accuracy_pct"] is None
    assert all("reverse_kl_nats" not in row for row in done.rows)
    moving = [row["grad_norm"] > 0 for row in done.rows]
    assert moving == [row["reward_uniform_group_fraction"] < 1 for row in done.rows]
    bounded("opd run: max |p_learner - p_sampler|", summary["probs_diff_max"], 1e-4, "grpo")


def test_a_student_guesses_turn_by_turn(
    inputs: Path, tmp_path: Path, arithmetic: Sections, start: Callable[..., Running]
):
    """Trajectories, distilled and rewarded at once; the environment has processes of its own."""
    game = {"type": "guess", "low": 1, "high": 50, "guesses": 3, "max_tokens": 240}
    mixture = [
        {"coefficient": 1.0, "objective": {"type": "reverse_kl"}},
        {"coefficient": 0.5, "objective": {"type": "grpo"}},
    ]
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 2},
        data={"train": str(ARITHMETIC / "train.jsonl"), "heldout": None, "chat_template": True},
        **arithmetic,
        environment=game,
        objective={"type": "mixture", "terms": mixture},
        rollout={"group_size": 4, "max_new_tokens": 24},
        buffer={"batch_size": 8},
        learner={"max_tokens_per_microbatch": 1024},
        evaluation={"problems": 0},
        metrics={"rollouts": 8},
    )
    done = start(config).finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    summary = done.summary
    assert summary["status"] == "finished"
    assert summary["samples_consumed"] == 16
    assert summary["samples_in_flight"] == 0
    bounded("opd run: max |p_learner - p_sampler|", summary["probs_diff_max"], 1e-4, "turns")
    for row in done.rows:
        assert 1 < row["turns_mean"] <= 3
        assert row["given_tokens_mean"] > row["turns_mean"]
    rows = [json.loads(line) for line in (done.run_dir / "rollouts.jsonl").open()]
    trained = [row for row in rows if row["version"] is not None]
    assert len(trained) == 16
    assert all(row["reward"] in (0.0, 1.0) for row in trained)
    several = [row for row in trained if row["given"]]
    assert several, "most games need more than one guess"
    for row in several:
        assert len(row["given"]) < 3
        assert row["prompt"].startswith("I think of a whole number from 1 to 50.")
        for at, text in row["given"]:
            assert 0 < at < len(row["tokens"])
            assert "Too low." in text or "Too high." in text or "Say a whole number." in text
        assert row["spans"][-1][2] == len(row["tokens"]) == len(row["teacher_logp"])
