"""The benchmark of weight syncs around its cases, which are not run, and its counters."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks import weight_sync
from benchmarks.weight_sync.cases import SIZES, Case, chosen_cases
from benchmarks.weight_sync.processes import measured
from benchmarks.weight_sync.summary import ratios
from megatron_opd.config.schema import Config

MIB = 2**20
TINY = ("--tiny",)


def figures(seconds: float, differing: tuple[str, ...] = ("rank 0 a",)) -> dict[str, Any]:
    """What a case of one learner rank and one server rank leaves."""
    rank = {"cpu_s": [1.0], "peak_extra_bytes": [8], "sent_bytes": [100], "received_bytes": [200]}
    sync = {"seconds": seconds, "paused_s": seconds / 2, "phases_s": {"send": seconds}}
    sync |= {"learner_held_s": seconds / 4, "learner": rank, "server": rank}
    return {
        "up_s": 1.0,
        "open_s": 0.1,
        "first": sync | {"phases_s": {"send": seconds, "verify": 3.0, "verify live": 1.0}},
        "syncs": [sync, sync],
        "shard_bytes": [160],
        "decoding": {"syncs": [sync], "tokens_lost_of_each": [5.0]}
        | dict.fromkeys(("tokens_lost", "tokens_per_s", "tokens_per_s_times_pause"), 5.0)
        | {"window_s": 9.0},
        "flipped_bit": {
            "differing_before": [],
            "differing": list(differing),
            "differing_after_the_next_sync": [],
        },
    }


class Cases:
    """Stands for running cases: says what they leave, and which were run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **made: dict[str, Any]) -> None:
        self.made, self.run = made, list[str]()
        monkeypatch.setattr(weight_sync, "run_case", self)

    def __call__(self, case: Case, model: Path, scratch: Path) -> dict[str, Any]:
        assert (model / "model.safetensors").exists()
        self.run.append(case.way)
        return self.made.get(case.way, figures(2.0))


def test_it_goes_on_where_it_was_and_a_change_of_code_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows, cases = tmp_path / "runs" / "rows.jsonl", Cases(monkeypatch, broadcast=figures(6.0))
    part = weight_sync.measure([*TINY, "--limit", "1"], rows=rows)
    assert part["missing"] == ["tp2_to_tp1-broadcast"]
    whole = weight_sync.measure(TINY, rows=rows)
    assert cases.run == ["shards", "broadcast"], "no case is run twice"
    assert whole["missing"] == whole["failed"] == []
    assert whole["times_shards"]["tp2_to_tp1"]["broadcast"]["seconds"] == 3
    row = whole["cases"]["tp2_to_tp1-shards"]
    assert row["learner_held_s"] == 0.5
    assert (row["verify_s"], row["received_over_shard"], row["cpu_s"]) == (4.0, [1.25], 2.0)
    monkeypatch.setattr(Case, "fingerprint", lambda case: "other code")
    weight_sync.measure(TINY, rows=rows)
    assert cases.run == ["shards", "broadcast"] * 2


@pytest.mark.parametrize("differing", [(), ("rank 0 a", "rank 1 b")])
def test_a_flipped_bit_that_is_not_found_alone_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differing: tuple[str, ...]
):
    Cases(monkeypatch, shards=figures(2.0, differing))
    found = weight_sync.measure(TINY, rows=tmp_path / "rows.jsonl")
    assert found["failed"] == ["tp2_to_tp1-shards"]


def test_a_figure_that_was_not_measured_has_no_ratio():
    one, none = {"seconds": 2.0}, {"seconds": None}
    keys = dict.fromkeys(("paused_s", "cpu_s", "learner_peak_extra_bytes"), 1)
    keys |= dict.fromkeys(("server_peak_extra_bytes", "sent_bytes_max", "received_bytes_max"), 0)
    keys |= {"tokens_lost": -1.0, "tokens_per_s_times_pause": 1.0, "verify_s": 1.0}
    found = ratios({"shards": keys | one, "broadcast": keys | none})["broadcast"]
    assert found["seconds"] is found["tokens_lost"] is found["sent_bytes_max"] is None
    assert found["paused_s"] == 1
    assert ratios({"broadcast": keys | one}) == {}


@pytest.mark.parametrize("size", SIZES)
def test_every_case_is_a_valid_run(size: str, tmp_path: Path):
    cases = chosen_cases(SIZES[size])
    assert len({case.name for case in cases}) == len(cases) >= 2
    for case in cases:
        asked = json.loads(json.dumps(case.asked(tmp_path, tmp_path)))
        config = Config.model_validate(asked["config"])
        assert config.student.tp * config.learner.parallel.world_size in (2, 4)


def test_bytes_and_memory_are_counted_by_process(monkeypatch: pytest.MonkeyPatch):
    me = (os.getpid(),)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        with sender, receiver:
            with measured(me) as spent:
                memory = bytearray(64 * MIB)
                for _ in range(10):
                    sender.sendall(bytes(10_000))
                    assert receiver.recv(10_000, socket.MSG_WAITALL)
                del memory
            assert spent.peak_extra_bytes is not None
            assert 60 * MIB < spent.peak_extra_bytes[0] < 80 * MIB
            # all that is open here counts, so at least these
            assert spent.sent_bytes is None or spent.sent_bytes[0] >= 100_000
            assert spent.received_bytes is None or spent.received_bytes[0] >= 100_000
    monkeypatch.setenv("PATH", "")
    with measured(me) as spent:
        sum(range(10_000_000))  # CPU time is counted in hundredths of a second
    assert (spent.sent_bytes, spent.received_bytes) == (None, None)
    assert spent.cpu_s is not None
    assert spent.cpu_s[0] > 0
