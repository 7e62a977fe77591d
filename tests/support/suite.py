"""The kinds of test files, how many seconds each takes, and which of them a fast run has.

tests/seconds.json is the table of seconds and tests, written by `--seconds tests/seconds.json`. A
file that is not in it takes less than KEPT_S, or is new.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TABLE = ROOT / "tests" / "seconds.json"
KEPT_S = 1.0
FAST_S, FAST_RATE = 10.0, 3.0
"""The longest that a file of a fast run may take, and the fewest tests a second."""
Table = dict[str, list[float]]
"""By file its seconds and its number of tests."""
# The longest first: a worker for SERVERS, the other for dist; short files even out the end.
# RAY: a Ray cluster finds others on its machine, and uses the same ports.
SERVERS, RAY = "servers", "ray"
ORDER = (SERVERS, "dist", "e2e", RAY)
# Of tests/e2e: these start servers of their own and may run on either worker.
APART = (
    "test_bridge_parallel.py",
    "test_deterministic.py",
    "test_resume.py",
    "test_torchrun_scripts.py",
)


def kind_of(path: str) -> str:
    """The first folder below tests/, SERVERS: what uses the two servers of a session, or RAY."""
    kind, *_, name = path.removeprefix("tests/").split("/")
    if name.startswith("test_ray_") or name.endswith("_ray.py"):
        return RAY
    return SERVERS if kind == "e2e" and name not in APART else kind


def rank_of(path: str) -> int:
    """Files of a lower rank are run first."""
    kind = kind_of(path)
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def is_fast(path: str, table: Table) -> bool:
    """Whether a fast run has the file: one of tests/unit without Ray, quick for what it tests."""
    seconds, tests = table.get(path, (0.0, 0))
    return kind_of(path) == "unit" and seconds <= FAST_S and tests >= FAST_RATE * seconds


def read_table(path: Path = TABLE) -> Table:
    """Seconds and tests by test file; empty if there is no table."""
    return json.loads(path.read_text()) if path.exists() else {}


class Seconds:
    """A plugin that writes a table of the seconds of each file, fixtures included, on all workers.

    Files that were not run keep their entries, unless they are gone.
    """

    def __init__(self, table: Path) -> None:
        self.table = table
        self.by_file: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        measured = self.by_file[report.nodeid.partition("::")[0]]
        measured[0] += report.duration
        measured[1] += report.when == "call"

    def pytest_sessionfinish(self) -> None:
        found = read_table(self.table) | self.by_file
        lines = [
            f'"{name}": [{seconds:.1f}, {tests}]'
            for name, (seconds, tests) in sorted(found.items())
            if seconds >= KEPT_S and (ROOT / name).exists()
        ]
        self.table.write_text("{\n" + ",\n".join(lines) + "\n}\n")
