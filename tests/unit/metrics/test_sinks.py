"""Where rows go, and numbers that JSON has no name for."""

import math

import numpy as np

from megatron_opd.metrics.sinks import json_ready
from tests.support.fakes import Learner
from tests.support.recorded_run import record


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, learner=Learner(measures_mismatch=lambda update: update % 2 == 1))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = events.Scalars("opd/loss")
    assert [(event.step, event.value) for event in losses] == [(k, 0.5) for k in range(7)]
    assert losses[0].wall_time > 1e9
    measured = events.Scalars("opd/probs_diff_max")
    assert [event.step for event in measured] == [1, 3, 5], "what is null is no point"


def test_json_ready_handles_numpy_and_non_finite_numbers():
    value = {"a": np.float32(0.5), "b": [np.int64(3), math.nan, math.inf], 3: (True, None, "x")}
    assert json_ready(value) == {"a": 0.5, "b": [3, None, None], "3": [True, None, "x"]}
