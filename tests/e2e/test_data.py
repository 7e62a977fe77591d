"""A run on a mixture of a saved data set and a table, which ends when one of them is used up."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.e2e.runs import START_TIMEOUT_S, Finished, Running, write_config
from tests.support.paths import ROOT

pytestmark = pytest.mark.e2e

ARITHMETIC = ROOT / "examples" / "arithmetic"
ROWS, BATCH, MOST = 24, 8, 20


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
    inputs: Path, tmp_path: Path, start: Callable[..., Running]
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
        student={"model": str(ARITHMETIC / "student")},
        teacher={"model": str(ARITHMETIC / "teacher")},
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
