"""The tables of the gap read rows that were recorded before there were gate weights, and later."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import mismatch_table


def figures(*kinds: str) -> dict[str, Any]:
    """The gap of the n-th kind is 1 / 2^n, in three sets."""
    found: dict[str, Any] = {}
    for n, kind in enumerate(kinds):
        gap = {"max_dp": [0.5**n] * 3, "mean_dp": [0.1 * 0.5**n] * 3}
        found[kind] = dict.fromkeys(("1x", "5x", "5x_start", "1x_of_5"), gap)
    return found


def printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, *kinds: str
) -> str:
    case = {"model": "moe", "server": "tp1", "dtype": "bfloat16", "deterministic": False}
    case |= {"learners": {"1": figures(*kinds)}, "decode_prefill": figures("decode")["decode"]}
    (tmp_path / "grid.json").write_text(json.dumps({"cases": {"moe-tp1-bfloat16": case}}))
    patch.setattr("sys.argv", ["mismatch_table.py", str(tmp_path / "grid.json")])
    assert mismatch_table.main() == 0
    return capsys.readouterr().out


def test_rows_without_gates_have_no_table_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    kinds = ("decode", "prefill", "decode_replayed")
    table = printed(tmp_path, capsys, monkeypatch, *kinds)
    assert "gates" not in table
    assert "| moe | bfloat16 | replayed |  | max_dp | 0.25 | 0.25 | 0.25 | 0 of 6 |" in table


def test_gates_are_compared_with_replayed_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    table = printed(tmp_path, capsys, monkeypatch, *mismatch_table.KINDS)
    assert "decode_replayed_gates, 5x" in table
    assert "| moe | bfloat16 | gates |  | max_dp | 0.50 | 0.50 | 0.50 | 0 of 6 |" in table
