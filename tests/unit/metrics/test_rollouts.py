"""The record of rollouts: which samples, what of them, and what a drop or a full disk leaves."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.metrics.rollouts import RolloutRecord, spread
from megatron_opd.records.sample_figures import AlignedScores
from megatron_opd.records.types import (
    Batch,
    HeldRollout,
    HeldSample,
    MadeCall,
    Sample,
    TurnFigures,
    VersionSpan,
)
from tests.support.fakes import Figures, held_rollout, make_prompt, make_rollout, make_sample
from tests.support.recorded_run import record
from tests.support.trajectories import trajectory


def decode(ids: Sequence[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_holds_what_a_reader_needs(tmp_path: Path):
    prompt = replace(make_prompt(7), teacher_ids_Q=np.array([8, 9], np.int32))
    rollout = make_rollout(prompt, (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)))
    teacher = np.arange(6, dtype=np.float32) / -8
    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 4)
    kept.trained(Batch(5, 5, (Sample(rollout, teacher, 0.5),)), Figures(), 0.0, 1.0)
    kept.close()
    (row,) = rows_of(tmp_path / "rollouts.jsonl")
    assert row.pop("unix_time_s") > 1.7e9
    assert row == {
        "update": 5,
        "uid": 7,
        "version": 5,
        "teacher": "teacher",
        "engine": "student-0",
        "reward": 0.5,
        "staleness_versions": 2,
        "finish_reason": "stop",
        "drop_reason": None,
        "drop_detail": None,
        "spans": [[3, 0, 2], [4, 2, 3]],
        "prompt": "<0><1><2>",
        "teacher_prompt": "<8><9>",
        "teacher_version": None,
        "chunked": False,
        "given": [],
        "turns": [],
        "played_s": None,
        "tokens": ["<4>", "<4>", "<4>"],
        "sampler_logp": [-0.5, -0.5, -0.5],
        "teacher_logp": [0.0, -0.25, -0.5],
    }
    assert "-0.0" not in (tmp_path / "rollouts.jsonl").read_text()


def test_a_row_says_what_a_teacher_of_another_tokenizer_has_scored(tmp_path: Path):
    prompt = replace(make_prompt(7), teacher_ids_Q=np.array([8, 9], np.int32))
    rollout = make_rollout(prompt, (VersionSpan(3, 0, 3),))
    scores = np.full(6, -0.5, np.float32)
    kept = RolloutRecord(tmp_path / "rows", decode, 4, decode_teacher=lambda ids: f"T{len(ids)}")
    for update, chunked in enumerate((False, True)):
        own = AlignedScores(np.array([1, 0, 1], np.uint8), scores[:2], chunked)
        batch = Batch(update, update, (Sample(rollout, scores, aligned=own),))
        kept.trained(batch, Figures(), 0.0, 1.0)
    kept.close()
    for row, chunked in zip(rows_of(tmp_path / "rows"), (False, True), strict=True):
        assert row["teacher_logp"] == [-0.5, None, -0.5]
        assert (row["prompt"], row["teacher_prompt"]) == ("<0><1><2>", "T2")
        assert row["chunked"] is chunked


def test_a_row_of_several_turns_says_what_was_given_between(tmp_path: Path):
    rollout = trajectory(3, [[(2, 1), (2, 2)], [(1, 1)]]).rollout
    first, second = rollout.sequences
    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 1)
    scores = np.full(rollout.num_ids, -0.5, np.float32)
    kept.trained(Batch(2, 2, (Sample(rollout, scores),)), Figures(), 0.0, 1.0)
    kept.close()
    (row,) = rows_of(tmp_path / "rollouts.jsonl")
    assert row["prompt"] == decode(first[:2].tolist())
    assert row["given"] == [[1, decode(first[3:5].tolist())], [3, decode(second[:1].tolist())]]
    assert row["tokens"] == [decode([i]) for i in rollout.response_ids_T.tolist()]
    assert row["turns"] == []


def test_a_row_says_what_each_turn_was(tmp_path: Path):
    made = (MadeCall("add", '{"a": 1}'), MadeCall("sub", "{}", "there is no tool sub"))
    turns = (
        TurnFigures(2.0, 0.5, 2, 1, 0, 0.25, waiting_s=1.5, made=made, answered_by="tool"),
        TurnFigures(1.0, 0.0, cached=3, branch="new"),
    )
    rollout = replace(trajectory(3, [[(2, 1)], [(1, 3)]]).rollout, turns=turns, finished_s=9.0)
    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 1)
    scores = np.full(rollout.num_ids, -0.5, np.float32)
    kept.trained(Batch(2, 2, (Sample(rollout, scores),)), Figures(), 0.0, 1.0)
    kept.close()
    (row,) = rows_of(tmp_path / "rollouts.jsonl")
    assert row["played_s"] == 9.0
    first, second = row["turns"]
    assert first == {
        "start": 0,
        "sequence": 0,
        "branch": "",
        "reward": 0.25,
        "sampling_s": 2.0,
        "waiting_s": 1.5,
        "environment_s": 0.5,
        "cached": 0,
        "answered_by": "tool",
        "calls": [["add", '{"a": 1}', None], ["sub", "{}", "there is no tool sub"]],
    }
    assert (second["start"], second["sequence"], second["reward"]) == (1, 1, None)
    assert second["branch"] == "new"
    assert second["calls"] == []


def test_without_a_teacher_there_are_no_scores(tmp_path: Path):
    sample = make_sample(1)
    nothing = np.full_like(sample.teacher_logp_N, np.nan)
    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 1)
    kept.trained(Batch(0, 0, (Sample(sample.rollout, nothing),)), Figures(), 0.0, 1.0)
    kept.close()
    assert rows_of(tmp_path / "rollouts.jsonl")[0]["teacher_logp"] is None


@pytest.mark.parametrize(
    ("there", "count", "uids"), [(8, 4, [0, 2, 4, 6]), (8, 3, [0, 2, 5]), (2, 5, [0, 1])]
)
def test_samples_are_spread_over_a_batch_whatever_its_order(there: int, count: int, uids):
    samples = [make_sample(uid) for uid in range(there)]
    for order in (samples, samples[::-1]):
        assert [sample.rollout.prompt.uid for sample in spread(order, count)] == uids


def test_a_drop_is_recorded_as_far_as_it_came(tmp_path: Path):
    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 4, updates=6)
    kept.admitted(make_prompt(0))
    kept.rolled_out(make_rollout(make_prompt(1), (VersionSpan(0, 0, 2),)))
    kept.scored(make_sample(2), 0.0, 1.0)
    for uid in (0, 1, 2, 3):
        kept.dropped(uid, "why", f"engine {uid}")
    kept.close()
    rows = rows_of(tmp_path / "rollouts.jsonl")
    assert [row["prompt"] for row in rows] == ["<0><1><2>"] * 3 + [None]
    assert [len(row["tokens"]) for row in rows] == [0, 2, 4, 0]
    assert [row["teacher_logp"] is None for row in rows] == [True, True, False, True]
    assert {(row["update"], row["version"], row["drop_reason"]) for row in rows} == {
        (6, None, "why")
    }
    assert rows[1]["drop_detail"] == "engine 1"


def test_drops_between_two_updates_are_bounded(tmp_path: Path):
    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 2)
    for uid in range(5):
        kept.dropped(uid, "why", "")
    kept.trained(Batch(0, 0, (make_sample(5),)), Figures(), 0.0, 1.0)
    for uid in range(6, 9):
        kept.dropped(uid, "why", "")
    kept.close()
    assert [row["uid"] for row in rows_of(tmp_path / "rollouts.jsonl")] == [0, 1, 5, 6, 7]


def test_the_event_loop_waits_for_no_text(tmp_path: Path):
    """Decoding is held up; the calls of the event loop return all the same."""
    go = threading.Event()

    def slow(ids: Sequence[int]) -> str:
        assert go.wait(60)
        return decode(ids)

    kept = RolloutRecord(tmp_path / "rollouts.jsonl", slow, 2)
    for update in range(3):
        kept.trained(Batch(update, update, (make_sample(update),)), Figures(), 0.0, 1.0)
    assert (tmp_path / "rollouts.jsonl").read_bytes() == b""
    go.set()
    kept.close()
    assert [row["update"] for row in rows_of(tmp_path / "rollouts.jsonl")] == [0, 1, 2]


def test_what_cannot_be_written_is_raised_at_the_end_and_only_once(tmp_path: Path):
    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 1)
    kept._file.close()
    kept.trained(Batch(0, 0, (make_sample(0),)), Figures(), 0.0, 1.0)
    with pytest.raises(ValueError, match="closed file"):
        kept.close()
    kept.close()


def test_a_run_records_what_it_trains_on_and_drops(tmp_path: Path):
    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 2)
    _, learner = record(tmp_path, drop={4}, rollouts=kept)
    rows = rows_of(tmp_path / "rollouts.jsonl")
    trained = [row for row in rows if row["drop_reason"] is None]
    by_update = {batch.update: batch for batch in learner.batches}
    assert len(trained) == 2 * len(by_update)
    for row in trained:
        batch = by_update[row["update"]]
        (sample,) = (s for s in batch.samples if s.rollout.prompt.uid == row["uid"])
        assert row["staleness_versions"] == batch.version - sample.rollout.oldest_version
    (drop,) = (row for row in rows if row["drop_reason"] is not None)
    assert (drop["uid"], drop["drop_reason"], drop["drop_detail"]) == (4, "nan", "teacher-0")
    assert len(drop["tokens"]) == 4


def as_held(sample: Sample) -> HeldSample:
    """What the controller has of a sample whose arrays are with a data worker."""
    held = held_rollout(sample.rollout, "r", sample.cache)
    return HeldSample(held, sample.scores(16), sample.reward)


def test_arrays_of_a_data_worker_are_asked_for_at_once(tmp_path: Path):
    """The row is that of the whole sample; where the arrays are gone it has no tokens."""
    samples = {uid: make_sample(uid) for uid in range(3)}
    asked: dict[int, Future[Any]] = {}

    def fetch(found: HeldRollout | HeldSample) -> Future[Any]:
        rollout = found.rollout if isinstance(found, HeldSample) else found
        asked[rollout.prompt.uid] = Future()
        return asked[rollout.prompt.uid]

    kept = RolloutRecord(tmp_path / "rollouts.jsonl", decode, 3, fetch)
    kept.trained(Batch(4, 4, tuple(map(as_held, samples.values()))), Figures(), 0.0, 1.0)
    assert sorted(asked) == [0, 1, 2]
    asked[0].set_result(samples[0])
    asked[1].set_exception(SamplesLost("data worker 0 is lost"))
    kept.close()  # the third never comes
    rows = rows_of(tmp_path / "rollouts.jsonl")
    assert [row["uid"] for row in rows] == [0, 1, 2]
    assert [len(row["tokens"]) for row in rows] == [4, 0, 0]
    assert all(row["spans"] == [[0, 0, 4]] and row["version"] == 4 for row in rows)
    whole = RolloutRecord(tmp_path / "whole.jsonl", decode, 3)
    whole.trained(Batch(4, 4, (samples[0],)), Figures(), 0.0, 1.0)
    whole.close()
    (expected,) = rows_of(tmp_path / "whole.jsonl")
    assert rows[0] | {"unix_time_s": 0} == expected | {"unix_time_s": 0}
