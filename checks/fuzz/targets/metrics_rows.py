"""metrics.jsonl of two runs -> what `opd compare` says, and what --resume keeps of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, one_of
from checks.fuzz.places import scratch
from megatron_opd.checkpoint.kept_rows import rows_before
from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.cli.commands.compare import read_rows, report
from megatron_opd.errors import UserError
from megatron_opd.metrics.compare import RunComparison, compare_rows, is_of_time

ROWS: list[dict[str, Any]] = [
    {"update": 0, "loss": 1.5, "grad_norm": 0.0, "excluded_ids": 0, "train_s": 1.0, "mfu": None},
    {"update": 1, "loss": float("nan"), "grad_norm": 2.5, "excluded_ids": 3, "reward": -0.0},
    {"update": 2, "loss": -1e-9, "grad_norm": float("inf"), "excluded_ids": 3, "type": "x"},
]
KEPT = 2


def text(rows: list[Any]) -> bytes:
    """As a run writes them."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def run_dir(data: bytes) -> Path:
    """A run of which nothing but its figures is left."""
    path = scratch() / "run"
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_bytes(data)
    return path


Result = tuple[list[dict[str, Any]], RunComparison, list[str], str]


def call(data: bytes) -> Result:
    """(rows, compared with ROWS, what is printed, what a resumed run keeps)."""
    path = run_dir(data)
    rows = read_rows(path)
    found = compare_rows(rows, ROWS)
    lines = [*report(found, 0.0), *report(found, 0.5)]
    if not all(line.isprintable() for line in lines):
        raise AssertionError(f"no lines for a terminal: {lines!r}"[:300])
    kept = rows_before(RunDir(path).metrics, KEPT)
    assert kept.part is not None, "the file is there"
    return rows, found, lines, kept.part.read_text(encoding="utf-8")


def oracle(data: bytes, result: Result) -> str | None:
    """Equal is what is equal value by value; a resumed run keeps whole rows of earlier updates."""
    rows, found, lines, kept = result
    try:
        whole = [json.loads(line) for line in data.split(b"\n")[:-1]]
    except ValueError:
        return "a line that is no row is passed over"
    if repr(rows) != repr(whole):
        return "rows are lost"
    pairs = list(zip(rows, ROWS, strict=False))
    names = {name for pair in pairs for row in pair for name in row if not is_of_time(name)}
    differing = {
        name for name in names if not all(_same(a.get(name), b.get(name)) for a, b in pairs)
    }
    if {each.column for each in found.differences} != differing:
        return "columns differ that are equal, or the reverse"
    if any(not each.relative > 0 for each in found.differences):
        return "a difference of nothing"
    if ("bitwise equal" in lines[0]) is not (not differing):
        return "said equal of runs that differ"
    expected = [row for row in whole if _before(row)]
    if repr([json.loads(line) for line in kept.split("\n")[:-1]]) != repr(expected):
        return "a resumed run keeps other rows"
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) is not isinstance(b, bool):
        return False
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return a == b


def _before(row: dict[str, Any]) -> bool:
    return type(row["update"]) is int and 0 <= row["update"] < KEPT


TREES = damaged_tree(ROWS)


def damaged_rows(rng: Random) -> bytes:
    """Rows in order, one of them damaged."""
    rows: list[Any] = [dict(row) for row in ROWS[: rng.randint(1, 3)]]
    if rng.random() < 0.8:
        rows[rng.randrange(len(rows))] = TREES(rng)
    return text(rows)


TARGET = Target(
    "metrics_rows",
    one_of(damaged_rows, damaged_rows, damaged_bytes([text(ROWS), text(ROWS[:1])])),
    call,
    (UserError,),
    oracle,
    share=2,
)
