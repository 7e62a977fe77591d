"""Evaluations beside a run on real engines, and its best checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.runs import START_TIMEOUT_S, Running, write_config

pytestmark = pytest.mark.e2e

UPDATES, EVERY = 6, 2


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]


def drawn(run_dir: Path) -> list[str]:
    """Names of the spans of evaluations in the time line."""
    events = json.loads((run_dir / "trace.json").read_text())
    (row,) = (each["pid"] for each in events if each.get("args") == {"name": "evaluation"})
    return [each["name"] for each in events if each["pid"] == row and each["ph"] == "X"]


def test_a_run_is_evaluated_while_it_trains(
    inputs: Path, tmp_path: Path, start: Callable[..., Running]
):
    problems = str(inputs / "train.jsonl")
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": UPDATES},
        data={"heldout": {"few": problems, "short": {"file": problems, "max_new_tokens": 2}}},
        student={"servers": 2},
        evaluation={
            **{"before": False, "every": EVERY, "servers": 1},
            **{"problems": 2, "samples": 4},
        },
        checkpoint={"every_minutes": 0, "keep_best": True},
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    run_dir, summary = done.run_dir, done.summary

    rows = evaluations(run_dir)
    places = [(row["update"], row["set"]) for row in rows]
    assert len(set(places)) == len(places), "none twice"
    for update in (EVERY, UPDATES):
        assert {(update, "few"), (update, "short")} <= set(places)
    left_out = summary["evaluations_skipped"]
    assert len(places) == 2 * (UPDATES // EVERY - left_out)
    assert (summary["evaluations_failed"], summary["status"]) == (0, "finished")
    for row in rows:
        assert row["update"] <= row["version_min"] <= row["version_max"] <= UPDATES
        assert 0 <= row["lag_steps"] <= UPDATES - row["update"]
        assert set(row["pass_at_k"]) == {"1", "2", "4"}
        assert row["pass_at_k"]["1"] == pytest.approx(row["accuracy_pct"])
        assert (row["problems"], row["samples"]) == (2, 4)
    assert all(row["mean_response_tokens"] <= 2 for row in rows if row["set"] == "short")
    picked = summary["evaluation_sets"]["few"]
    assert (picked["before"], picked["after"]["update"]) == (None, UPDATES)

    assert drawn(run_dir) == [f"{name} after {update} updates" for update, name in places]

    # the server that is kept for evaluations got every version and no rollout
    sampled = [row["servers"] for row in done.rows]
    (kept,) = {url for url in sampled[0] if all(row[url]["rollouts"] == 0 for row in sampled)}
    assert [row[kept]["version"] for row in sampled] == list(range(1, UPDATES + 1))
    assert (done.rows[0]["update"], summary["updates"]) == (0, UPDATES)

    best, checkpoints = picked["best"]["update"], run_dir / "checkpoints"
    steps = {path.name for path in checkpoints.glob("step-*")}
    assert f"step-{best:06d}" in steps
    assert f"{best} updates: {checkpoints / 'best'}" in done.output
    AutoModelForCausalLM.from_pretrained(checkpoints / "best")
    assert f"step-{UPDATES:06d}" in steps
    assert len(steps) <= 3, "the newest two and the best one"
