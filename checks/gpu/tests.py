"""tests/gpu, with the outcome of every test; in a dry check they are collected and skipped.

What does not end in time is interrupted, and the tests before it are still told.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from checks.gpu.process import echoed
from checks.gpu.record import PartFailed

# The suite's settings and its conftest ask for plugins that a bare GPU machine may lack.
ALONE = ("-c", "checks/gpu/pytest.ini", "--rootdir=.", "--noconftest", "-p", "no:cacheprovider")
END_S = 8.0  # for pytest's end and the report
INTERRUPTED = 2  # pytest's exit code
CORES = 2  # that a file's tests keep busy


def measure(limit_s: float, *, dry: bool) -> dict[str, Any]:
    """Outcomes by test. Raises PartFailed, with the first failure, where one fails or time ends.

    Files run side by side: most of their time, processes begin.
    """
    files = sorted(Path("tests/gpu").glob("test_*.py"))
    at_once = max(1, min(len(files), (os.cpu_count() or 1) // CORES))
    ends_s = time.monotonic() + limit_s - END_S
    with ThreadPoolExecutor(at_once) as threads:
        tests = [test for found in threads.map(partial(_of_file, ends_s), files) for test in found]
    figures = {"counts": counts(tests), "tests": tests}
    failed = [f"{test['name']}: {test['message']}" for test in tests if test["outcome"] == "failed"]
    if failed:
        raise PartFailed(f"{len(failed)} tests failed, the first: {failed[0]}", figures)
    return figures


def _of_file(ends_s: float, file: Path) -> list[dict[str, Any]]:
    """Outcomes of a file's tests, of those alone that ended until `ends_s` of time.monotonic()."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(file), "-v", *ALONE]
        exit_code, last_lines = echoed(
            [*command, "--continue-on-collection-errors", f"--junitxml={report}"],
            max(1.0, ends_s - time.monotonic()),
        )
        if not report.exists() and exit_code != INTERRUPTED:
            last = last_lines[-1] if last_lines else "no output"
            raise RuntimeError(f"pytest ended with {exit_code} and no report: {last}")
        tests = outcomes(report) if report.exists() else []
    if exit_code == INTERRUPTED:
        # the report tells the one that ran as if it had passed, and not its name
        late = {"name": f"{file.stem}: the next one", "outcome": "failed", "seconds": 0.0}
        tests = [*tests[:-1], late | {"message": "interrupted: time ended"}]
    return tests


def outcomes(report: Path) -> list[dict[str, Any]]:
    """{name, outcome, seconds, message} of every test in a junit file.

    A file that cannot be collected for want of a package is skipped and names it.
    """
    found: list[dict[str, Any]] = []
    for case in ET.parse(report).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        outcome, message = "passed", None
        for kind in ("failure", "error", "skipped"):
            child = case.find(kind)
            if child is not None:
                lines = f"{child.get('message') or ''}\n{child.text or ''}".split("\n")
                outcome, message = _told(kind, lines)
        seconds = float(case.get("time") or 0)
        found.append({"name": name, "outcome": outcome, "seconds": seconds, "message": message})
    return found


def _told(kind: str, lines: list[str]) -> tuple[str, str]:
    """(outcome, the line that says most)."""
    absent = [line for line in lines if "No module named" in line]
    if kind == "error" and absent:
        package = absent[-1].rpartition("No module named")[2].strip(" '\"").partition(".")[0]
        return "skipped", f"needs {package}"
    errors = [line for line in lines if line.startswith("E  ")]
    said = errors[0] if errors else next(filter(None, lines), "")
    return ("skipped" if kind == "skipped" else "failed"), said.lstrip("E ").strip()


def counts(tests: list[dict[str, Any]]) -> dict[str, int]:
    """How many passed, failed and were skipped."""
    return {
        kind: sum(test["outcome"] == kind for test in tests)
        for kind in ("passed", "failed", "skipped")
    }
