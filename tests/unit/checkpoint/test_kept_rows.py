"""Files of rows, cut back to the first updates of a run."""

import json
from pathlib import Path

import pytest

from megatron_opd.checkpoint.kept_rows import rows_before
from megatron_opd.errors import UserError


def write(path: Path, *updates: int, torn: str = "") -> None:
    rows = "".join(json.dumps({"uid": 1, "update": update}) + "\n" for update in updates)
    path.write_text(rows + torn)


def updates_of(path: Path) -> list[int]:
    return [json.loads(line)["update"] for line in path.read_text().splitlines()]


def test_rows_of_later_updates_go_in_any_order(tmp_path: Path):
    path = tmp_path / "rollouts.jsonl"
    write(path, 0, 1, 0, 3, 2, 1, torn='{"uid": 9, "upd')
    before = path.read_text()
    kept = rows_before(path, 2)
    assert path.read_text() == before
    kept.replace()
    assert updates_of(path) == [0, 1, 0, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_no_file_is_no_problem(tmp_path: Path):
    rows_before(tmp_path / "rollouts.jsonl", 2).replace()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["{}", "[]", "nothing", '{"update": -1}', '{"update": "a"}'])
def test_a_damaged_line_is_named_and_the_file_stays(tmp_path: Path, line: str):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f'{{"update": 0}}\n{line}\n')
    with pytest.raises(UserError, match=r"rollouts\.jsonl:2 is damaged: not a row of rollouts"):
        rows_before(path, 2)
    assert path.read_text() == f'{{"update": 0}}\n{line}\n'
