"""The benchmark of weight syncs at its tiny size, one way of it, with real processes."""

import json
from pathlib import Path

import pytest

from benchmarks import weight_sync

pytestmark = pytest.mark.e2e


def test_shards_are_measured_and_a_flipped_bit_is_found(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    found = weight_sync.measure(["--tiny", "--only", "shards"], rows=rows)
    assert found["failed"] == found["missing"] == []
    ((name, row),) = found["cases"].items()
    assert name == "tp2_to_tp1-shards"
    assert len(row["seconds_of_each"]) == 2
    assert 0 < row["paused_s"] < row["seconds"] < row["first_s"] + 60
    assert row["shard_bytes"] == [found["model_bytes"]], "one rank holds the whole model"
    assert len(row["learner_cpu_s"]) == 2
    assert row["tokens_per_s"] > 0
    if row["received_over_shard"] is not None:
        # the numbers themselves pass through memory: all ranks are on one host
        assert 0 < row["received_over_shard"][0] < 0.05
    (kept,) = map(json.loads, rows.read_text().splitlines())
    assert kept["figures"]["first"]["phases_s"]["verify"] > 0
