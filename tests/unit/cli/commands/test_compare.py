"""`opd compare`: how it reads two runs, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.cli.commands.compare import read_rows
from megatron_opd.cli.main import main
from tests.support.cli_cases import refused


def row(**values: Any) -> dict[str, Any]:
    return {"update": 0, "loss": 0.5, "reward_mean": None, "time_s": 1.0} | values


def write(run_dir: Path, rows: list[dict[str, Any]], end: str = "") -> str:
    run_dir.mkdir()
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (run_dir / "metrics.jsonl").write_text(text + end)
    return str(run_dir)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [row(update=i, loss=1 / (i + 1)) for i in range(5)]
    a = write(tmp_path / "a", rows, end='{"update": 5, "lo')
    same = write(tmp_path / "b", rows[:3])
    other = [dict(each, loss=each["loss"] * (1 + 1e-7 * (each["update"] > 1))) for each in rows]
    b = write(tmp_path / "c", other)
    assert main(["compare", a, same]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{a} has 5 updates, {same} has 3"
    assert said[1].startswith("3 updates, 3 columns: bitwise equal (1 columns of time")
    assert main(["compare", a, b]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("5 updates, 3 columns: 1 columns differ")
    assert said[1].strip().startswith("loss: from update 2 on, in 3 rows, relative difference up")
    assert main(["compare", a, b, "--tolerance", "1e-6"]) == 0
    assert "equal to 1.0e-07" in capsys.readouterr().out


def test_names_of_columns_do_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    a = write(tmp_path / "a", [row(**{"\x1b[31m\ud800": 1})])
    assert main(["compare", a, write(tmp_path / "b", [row()])]) == 1
    assert "  \\x1b[31m\\ud800: from update 0" in capsys.readouterr().out


def test_a_number_in_one_run_alone_is_said_to_be_so(tmp_path: Path, capsys: Any):
    a, b = write(tmp_path / "a", [row(reward_mean=0.5)]), write(tmp_path / "b", [row()])
    assert main(["compare", a, b]) == 1
    said = capsys.readouterr().out
    assert "reward_mean: from update 0 on, in 1 rows, in some of them only one run" in said


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = write(tmp_path / "good", [row()])
    refused(capsys, main(["compare", good, str(tmp_path / "none")]), "cannot read", "metrics.jsonl")
    empty = write(tmp_path / "empty", [], end='{"upd')
    refused(capsys, main(["compare", good, empty]), "no update yet", "empty")
    broken = write(tmp_path / "broken", [row()], end="[1]\n")
    refused(capsys, main(["compare", broken, good]), "metrics.jsonl:2", "not a JSON object")
    for name, content in (("binary", b"\xff\x00\n"), ("deep", b"[" * 100_000 + b"\n")):
        odd = write(tmp_path / name, [])
        (tmp_path / name / "metrics.jsonl").write_bytes(content)
        refused(capsys, main(["compare", good, odd]), "metrics.jsonl:1", "not a JSON object")
    code = main(["compare", good, good, "--tolerance", "-1"])
    refused(capsys, code, "--tolerance", ">= 0", "-1")


def test_a_carriage_return_ends_no_row(tmp_path: Path):
    """Before: the rows behind it were left out, and nothing was said."""
    run_dir = tmp_path / "run"
    write(run_dir, [row(update=0)], end='{"update": 1,\r"loss": 1}\n{"update": 2}\n{"up')
    assert [each["update"] for each in read_rows(run_dir)] == [0, 1, 2]
