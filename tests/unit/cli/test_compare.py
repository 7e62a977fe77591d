"""`opd compare`: what two runs have in common, and what does not count."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.cli.compare import read_rows
from megatron_opd.cli.main import main
from megatron_opd.metrics.compare import compare_rows, is_of_time
from tests.support.cli_cases import refused


def row(**values: Any) -> dict[str, Any]:
    return {"update": 0, "loss": 0.5, "reward_mean": None, "time_s": 1.0} | values


def write(run_dir: Path, rows: list[dict[str, Any]], end: str = "") -> str:
    run_dir.mkdir()
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (run_dir / "metrics.jsonl").write_text(text + end)
    return str(run_dir)


def test_time_memory_and_queues_do_not_count():
    free = {"peak_rss_bytes": 5, "tokens_per_s": 1.0, "unix_time_s": 2.0, "rolling_samples": 3}
    found = compare_rows([row(**free)], [row(**dict.fromkeys(free, -1), time_s=9.0)])
    assert found.differences == ()
    assert set(found.left_out) == {*free, "time_s"}
    assert set(found.columns) == {"update", "loss", "reward_mean"}
    assert not is_of_time("num_ids")


def test_a_difference_is_the_largest_and_says_where_it_began():
    a = [row(update=i, loss=0.5, ratio_max=1.0) for i in range(4)]
    b = [dict(each) for each in a]
    b[1]["ratio_max"] = 1.0 + 1e-9
    b[2]["loss"], b[3]["loss"] = 0.25, 0.499
    b[3]["reward_mean"] = 0.1
    found = compare_rows(a, b)
    assert [each.column for each in found.differences] == ["ratio_max", "loss", "reward_mean"]
    loss = found.differences[1]
    assert (loss.first_update, loss.updates, loss.relative) == (2, 2, 0.5)
    assert math.isinf(found.differences[2].relative), "a number is no null"
    assert [each.column for each in found.beyond(1e-8)] == ["loss", "reward_mean"]


def test_a_column_that_one_run_lacks_is_a_difference():
    found = compare_rows([row(new=1)], [row()])
    assert [each.column for each in found.differences] == ["new"]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 10**400, "0.5", [0.5], None])
def test_what_is_no_finite_number_differs_from_one(odd: Any):
    [found] = compare_rows([row(loss=odd)], [row()]).differences
    assert found.column == "loss"
    assert math.isinf(found.relative)
    assert compare_rows([row(loss=odd)], [row(loss=odd)]).differences == ()
    assert compare_rows([row(loss=odd)], [row(loss="other")]).differences != ()


def test_integers_beyond_float64_are_compared_whole():
    [found] = compare_rows([row(loss=2**60)], [row(loss=2**60 + 1)]).differences
    assert found.relative == 2**-60


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


@pytest.mark.parametrize(("one", "other"), [(0.0, math.nan), (True, 1), (False, 0.0)])
def test_values_of_other_kinds_differ(one: Any, other: Any):
    """Before: ZeroDivisionError for the first, equal for the others."""
    for a, b in ((one, other), (other, one)):
        (found,) = compare_rows([row(loss=a)], [row(loss=b)]).differences
        assert found.relative == math.inf


def test_a_carriage_return_ends_no_row(tmp_path: Path):
    """Before: the rows behind it were left out, and nothing was said."""
    run_dir = tmp_path / "run"
    write(run_dir, [row(update=0)], end='{"update": 1,\r"loss": 1}\n{"update": 2}\n{"up')
    assert [each["update"] for each in read_rows(run_dir)] == [0, 1, 2]
