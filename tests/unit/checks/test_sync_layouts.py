"""The study of layouts meets every pair of factors; a row passes only with the right figures."""

import json
from dataclasses import asdict
from itertools import combinations, product
from pathlib import Path

import pytest

from checks import sync_layouts
from checks.sync_layouts.cases import DTYPES, FLEETS, LEARNERS, Case, all_cases
from harness.tiny_models import MODELS

GOOD = {
    "error_nats": 1e-6,
    "error_of_old_weights_nats": 3.0,
    "received_bytes": 100,
    "shard_bytes": 100,
}


def test_every_pair_that_can_be_met_is_met():
    cases = all_cases()
    assert len(cases) == len({case.name for case in cases}) < 30
    met = {pair for case in cases for pair in combinations(asdict(case).items(), 2)}
    for values in product(LEARNERS, FLEETS, (1, 2), MODELS, DTYPES, (False, True), (False, True)):
        case = Case(*values)
        if case.is_possible:
            assert met.issuperset(combinations(asdict(case).items(), 2)), case.name
    assert all(case.is_possible for case in cases)


def measured(monkeypatch: pytest.MonkeyPatch, rows: Path, found: dict, *options: str) -> dict:
    monkeypatch.setattr(sync_layouts, "run_case", lambda *_: found)
    monkeypatch.setattr(sync_layouts, "old_and_new", lambda *_: {"old": "old", "new": "new"})
    return sync_layouts.measure(options, rows=rows)


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = tmp_path / "rows.jsonl"
    first = measured(monkeypatch, rows, GOOD | {"error_nats": 0.0}, "--limit", "2")
    assert (len(first["cases"]), len(first["missing"])) == (2, len(all_cases()) - 2)
    again = measured(monkeypatch, rows, GOOD | {"error_nats": 0.0}, "--limit", "1")
    assert len(again["cases"]) == 3
    assert again["cases"].items() >= first["cases"].items()
    assert [json.loads(line)["name"] for line in rows.read_text().splitlines()] == [
        case.name for case in all_cases()[:3]
    ]
    assert again["failed"] == []


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({"error_nats": 2e-5}, "float32"),
        ({"error_nats": 1e-6}, "bfloat16"),
        ({"error_of_old_weights_nats": 1e-3}, "float32"),
        ({"received_bytes": 101}, "float32"),
    ],
)
def test_what_must_fail_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict, dtype: str
):
    found = GOOD | {"error_nats": 0.0} | change
    result = measured(monkeypatch, tmp_path / "rows.jsonl", found, "--only", dtype)
    assert result["failed"] == list(result["cases"]) != []
    fine = GOOD | {"error_nats": 0.0}
    result = measured(monkeypatch, tmp_path / "other.jsonl", fine, "--only", dtype)
    assert result["failed"] == []
