"""The benchmark of weight syncs at its tiny size: real processes, of this commit and of another."""

import json
from pathlib import Path

import pytest

from benchmarks import weight_sync

pytestmark = pytest.mark.e2e


def test_both_ways_are_measured_and_a_flipped_bit_is_found(tmp_path: Path):
    """The other commit is this one's last: it is started from a tree of its own all the same."""
    rows = tmp_path / "rows.jsonl"
    found = weight_sync.measure(["--tiny", "--before", "HEAD"], rows=rows)
    assert found["failed"] == found["missing"] == []
    assert list(found["cases"]) == ["tp2_to_tp1-shards", "tp2_to_tp1-before"]
    for name, row in found["cases"].items():
        assert len(row["seconds_of_each"]) == 2
        assert 0 < row["paused_s"] < row["seconds"] < row["first_s"] + 60
        assert row["shard_bytes"] == [found["model_bytes"]], "one rank holds the whole model"
        assert len(row["learner_cpu_s"]) == 2
        assert row["tokens_per_s"] > 0
        if row["received_over_shard"] is not None:
            assert row["received_over_shard"][0] == pytest.approx(1, abs=0.05), name
    shards, before = found["cases"].values()
    if shards["sent_bytes_max"] is not None:
        assert before["sent_bytes_max"] > 1.8 * shards["sent_bytes_max"], "rank 0 sends it all"
    (first, _) = map(json.loads, rows.read_text().splitlines())
    assert first["figures"]["first"]["phases_s"]["verify"] > 0
