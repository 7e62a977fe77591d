"""The kinds of test files, how many seconds each takes, and which of them a fast run has.

tests/seconds.json is the table of seconds, written by `--seconds tests/seconds.json`. A file that
is not in it takes less than KEPT_S, or is new.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TABLE = ROOT / "tests" / "seconds.json"
KEPT_S = 1.0
FAST_S = 10.0
"""The longest that a file of a fast run may take."""
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


def is_fast(path: str, table: dict[str, float]) -> bool:
    """Whether a fast run has the file: one of tests/unit without Ray that takes FAST_S at most."""
    return kind_of(path) == "unit" and table.get(path, 0.0) <= FAST_S


def read_table(path: Path = TABLE) -> dict[str, float]:
    """Seconds by test file; empty if there is no table."""
    return json.loads(path.read_text()) if path.exists() else {}


class Seconds:
    """A plugin that writes a table of the seconds of each file, fixtures included, on all workers.

    Files that were not run keep their entries, unless they are gone.
    """

    def __init__(self, table: Path) -> None:
        self.table = table
        self.by_file: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.by_file[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        seconds = read_table(self.table) | self.by_file
        kept = {
            name: round(seconds[name], 1)
            for name in sorted(seconds)
            if seconds[name] >= KEPT_S and (ROOT / name).exists()
        }
        self.table.write_text(json.dumps(kept, indent=0) + "\n")
