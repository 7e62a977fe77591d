"""Which test files a fast run has, and how the table of their seconds is kept."""

import json
from pathlib import Path

import pytest

from tests.support import suite
from tests.support.paths import ROOT


def test_the_table_has_only_files_that_exist():
    table = suite.read_table()
    assert table
    assert [name for name in table if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("path", "fast"),
    [
        ("tests/unit/a/test_new.py", True),
        ("tests/unit/a/test_quick.py", True),
        ("tests/unit/a/test_slow.py", False),
        ("tests/unit/a/test_waits.py", False),
        ("tests/unit/launch/test_ray_new.py", False),
        ("tests/e2e/test_new.py", False),
        ("tests/dist/test_new.py", False),
        ("tests/browser/test_new.py", False),
    ],
)
def test_a_fast_run_leaves_out_engines_ranks_and_slow_files(path: str, fast: bool):
    table = {
        "tests/unit/a/test_quick.py": [9.9, 30],
        "tests/unit/a/test_slow.py": [10.1, 99],
        "tests/unit/a/test_waits.py": [1.1, 3],
    }
    assert suite.is_fast(path, table) == fast


def test_the_table_keeps_existing_files_that_were_not_run(tmp_path: Path):
    here, other = "tests/unit/repository/test_suite.py", "tests/unit/repository/test_docs.py"
    table = tmp_path / "seconds.json"
    table.write_text(
        json.dumps({other: [7.0, 3], here: [100.0, 9], "tests/unit/test_gone.py": [9.0, 1]})
    )
    seconds = suite.Seconds(table)
    for nodeid, duration in ((f"{here}::test_a", 1.5), (f"{here}::test_b", 1.26)):
        report = pytest.TestReport(nodeid, (here, 1, ""), {}, "passed", None, "call", (), duration)
        seconds.pytest_runtest_logreport(report)
    seconds.pytest_sessionfinish()
    assert suite.read_table(table) == {here: [2.8, 2], other: [7.0, 3]}
