"""Where rows go, and numbers that JSON has no name for."""

import json
import math

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.sinks import JsonlSink, json_ready
from megatron_opd.metrics.tensorboard import TensorBoardSink
from megatron_opd.metrics.totals import RunTotals
from tests.support.fakes import Learner
from tests.support.recorded_run import record


def test_tensorboard_reads_back_what_was_written(tmp_path):
    record(tmp_path, learner=Learner(measures_mismatch=lambda update: update % 2 == 1))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in losses] == [(k, 0.5) for k in range(7)]
    assert losses[0].wall_time > 1e9
    measured = events.Scalars("train/probs_diff_max")
    assert [event.step for event in measured] == [1, 3, 5], "what is null is no point"


def test_json_ready_handles_numpy_and_non_finite_numbers():
    value = {"a": np.float32(0.5), "b": [np.int64(3), math.nan, math.inf], 3: (True, None, "x")}
    assert json_ready(value) == {"a": 0.5, "b": [3, None, None], "3": [True, None, "x"]}


EVALUATED = {"update": 3, "set": "held-out", "accuracy_pct": 50.0, "unix_time_s": 2e9}


def test_evaluations_have_a_file_of_their_own_which_the_first_one_makes(tmp_path):
    rows = JsonlSink(tmp_path / "metrics.jsonl")
    recorder = RunRecorder(RunTotals(), [rows, board := TensorBoardSink(tmp_path / "board")])
    file = tmp_path / "evaluations.jsonl"
    assert not file.exists()
    recorder.evaluated(EVALUATED)
    recorder.evaluated(EVALUATED | {"update": 4, "accuracy_pct": math.nan})
    rows.close()
    board.close()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert found == [EVALUATED, EVALUATED | {"update": 4, "accuracy_pct": None}]
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    (shown,) = events.Scalars("eval/held-out/accuracy_pct")
    assert (shown.step, shown.value, shown.wall_time) == (3, 50.0, 2e9)
