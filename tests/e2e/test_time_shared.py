"""Servers and learner that share memory in turn do what they do without, on real engines.

On a CPU nothing is freed: what is shown is that every step is taken and none changes a bit.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sglang_bridge import wire
from sglang_bridge.client import ServerClient
from tests.e2e.conftest import Sections
from tests.e2e.runs import START_TIMEOUT_S, UPDATES, Finished, Running, write_config

pytestmark = pytest.mark.e2e

ROWS = ("loss", "grad_norm", "reverse_kl_nats", "num_response_tokens")


def finished(
    inputs: Path,
    tmp_path: Path,
    start: Callable[..., Running],
    schedule: dict[str, Any],
    evaluation: dict[str, Any],
) -> Finished:
    """A deterministic run with this schedule, whose directory has been put aside."""
    config = write_config(
        inputs,
        tmp_path,
        run={"deterministic": True},
        schedule=schedule,
        evaluation=evaluation,
        checkpoint={"every": 2},
    )
    done = start(config).finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    aside = tmp_path / f"run-{len(schedule)}"
    done.run_dir.rename(aside)
    return Finished(aside, done.code, done.output)


def test_taking_turns_changes_no_bit(inputs: Path, tmp_path: Path, start: Callable[..., Running]):
    """Every update, and the final weights, also across checkpoints and evaluations in between."""
    plain = finished(inputs, tmp_path, start, {"type": "sync"}, {"problems": 0})
    in_turn, evaluated = {"type": "sync", "time_shared": True}, {"every": 1, "blocks": True}
    turns = finished(inputs, tmp_path, start, in_turn, {**evaluated, "before": False})
    assert [[row[key] for key in ROWS] for row in turns.rows] == [
        [row[key] for key in ROWS] for row in plain.rows
    ]
    of_plain, of_turns = (
        load_file(run.run_dir / "checkpoints" / "final" / "model.safetensors")
        for run in (plain, turns)
    )
    assert of_plain.keys() == of_turns.keys()
    assert [name for name in of_plain if not of_plain[name].equal(of_turns[name])] == []

    lines = (turns.run_dir / "evaluations.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [row["update"] for row in found] == list(range(1, UPDATES + 1))
    assert all(row["version_min"] == row["version_max"] == row["update"] for row in found)
    assert len(turns.rows) == UPDATES
    assert all(row["memory_release_s"] > 0 for row in turns.rows)
    assert all(0 < row["memory_resume_s"] < row["publish_s"] for row in turns.rows)
    assert turns.summary["memory_release_s_mean"] > 0
    assert all("memory_release_s" not in row for row in plain.rows)
    assert turns.output.count("frees no GPU memory of kv_cache and weights") == 1, turns.output
    assert "frees no GPU memory" not in plain.output


async def released(url: str) -> str:
    """The tags of what a server has given up now."""
    async with ServerClient(url, timeout_s=60) as client:
        (answer,) = await client.ask_ranks(f"{wire.RESUME_ACTION} ")
    return answer[wire.RELEASED]


def test_a_run_that_is_stopped_leaves_the_servers_of_others_whole(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """It is stopped in an update, while the server has given up its memory."""
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 200},
        schedule={"type": "sync", "time_shared": True},
        learner={"max_tokens_per_microbatch": 64},
        evaluation={"problems": 0},
        **shared,
    )
    running, (url,) = start(config), shared["student"]["urls"]
    running.wait_until(lambda: asyncio.run(released(url)) == "kv_cache,weights")
    os.kill(running.process.pid, signal.SIGINT)
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 130, done.output
    assert done.summary["status"] == "interrupted"
    assert asyncio.run(released(url)) == ""
