"""The grid of gaps: its cases, how it goes on, what it reads of them, what must fail."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from studies import mismatch_grid
from studies.mismatch_grid import _models, entries_of, passed, reading
from studies.mismatch_grid.cases import (
    DTYPES,
    LEARNERS,
    MATCHED,
    MODELS,
    SERVERS,
    Case,
    all_cases,
)


def gap(max_dp: float, mean_dp: float = 1e-7) -> dict[str, Any]:
    largest = {"median": max_dp, "p90": max_dp, "max": max_dp}
    figures = {"max_dp": [max_dp] * 3, "mean_dp": [mean_dp] * 3, "largest": largest}
    return figures | {"k3_nats": 0.0, "responses_above": 0.0}


def figures(case: Case, factor: float = 1.0) -> dict[str, Any]:
    """Five times the length doubles the gap; a learner split otherwise has three times the gap."""
    found = {}
    for learner in case.learners:
        base = 1e-6 * factor * (1 if MATCHED[case.server] == learner else 3)
        kinds = {"decode": base, "prefill": base / 2}
        found[learner] = {
            kind: {
                "1x": gap(each),
                "5x": gap(2 * each),
                "5x_start": gap(each),
                "1x_of_5": {"max_dp": [1.5 * each] * 3},
            }
            for kind, each in kinds.items()
        }
    return {"without_sync": {"largest": {"median": 0.9}}, "learners": found}


def test_every_server_meets_every_learner_in_both_formats():
    cases = all_cases()
    assert len(cases) == len({case.name for case in cases})
    plain = [case for case in cases if case.model == "moe" and not case.deterministic]
    assert {(case.server, case.dtype) for case in plain} == set(product(SERVERS, DTYPES))
    assert all(case.learners == tuple(LEARNERS) for case in plain)
    for case in cases:
        assert MATCHED[case.server] in case.learners
        assert case.model == "moe" or not any("ep2" in name for name in case.learners)


def measured(monkeypatch: pytest.MonkeyPatch, rows: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(mismatch_grid, "run_case", lambda case, *_: figures(case))
    monkeypatch.setattr(mismatch_grid, "_models", lambda *_: {"old": "old", "new": "new"})
    return mismatch_grid.measure(options, rows=rows)


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = tmp_path / "rows.jsonl"
    first = measured(monkeypatch, rows, "--limit", "2")
    assert (len(first["cases"]), len(first["missing"])) == (2, len(all_cases()) - 2)
    whole = measured(monkeypatch, rows)
    assert whole["missing"] == whole["failed"] == []
    names = [json.loads(line)["name"] for line in rows.read_text().splitlines()]
    assert names == [case.name for case in all_cases()]


def test_one_factor_at_a_time():
    cases = [Case("moe", "tp1", "float32"), Case("moe", "tp1", "bfloat16")]
    cases.append(Case("moe", "tp1", "float32", True))
    scales = {"float32": 1.0, "bfloat16": 100.0}
    entries = [
        entry
        for case in cases
        for entry in entries_of(
            vars(case) | figures(case, scales[case.dtype] * (0.5 if case.deterministic else 1))
        )
    ]
    read = reading(entries)
    now = read["float32"]
    assert now["max_dp 5x / 1x"]["median"] == pytest.approx(2)
    assert now["max_dp 5x / 1x"]["pairs"] == now["max_dp 5x / 1x"]["above_1"] == 4
    assert now["mean_dp 5x / 1x"]["median"] == pytest.approx(1)
    assert now["max_dp five of 1x / 1x"]["median"] == pytest.approx(1.5)
    assert now["max_dp prefill / decode"]["median"] == pytest.approx(0.5)
    assert now["max_dp deterministic / not"]["median"] == pytest.approx(0.5)
    assert now["max_dp replayed / free"] == {"pairs": 0}
    others = now["max_dp other layout / matched"]
    assert set(others) == {
        f"{kind}: {name} to tp1"
        for kind in ("decode", "prefill")
        for name in LEARNERS
        if name != "1"
    }
    assert all(each["median"] == pytest.approx(3) for each in others.values())
    assert read["max_dp bfloat16 / float32"]["median"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("dtype", "median", "largest", "passes"),
    [
        ("float32", 0.9, 1e-5, True),
        ("float32", 0.9, 2e-3, False),
        ("bfloat16", 0.9, 0.5, True),
        ("bfloat16", 0.01, 1e-5, False),
    ],
)
def test_what_must_fail_fails(dtype: str, median: float, largest: float, passes: bool):
    case = {"dtype": dtype, "without_sync": {"largest": {"median": median}}}
    case["learners"] = {"1": {"decode": {"5x": gap(largest)}}}
    assert passed(case) is passes


def test_the_models_are_peaked_and_never_end(tmp_path: Path):
    made = _models(tmp_path / "dense", MODELS["dense"])
    new, old = (load_file(made[name] / "model.safetensors") for name in ("new", "old"))
    assert not torch.equal(new["lm_head.weight"], old["lm_head.weight"])
    head = new["lm_head.weight"].float()
    assert head[:3].abs().max() == 0, "<pad>, <eos>, <unk>"
    assert head[3:].std() * 64**0.5 == pytest.approx(3, rel=0.05)
