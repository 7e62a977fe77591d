"""The check of a GPU: what it has time for, what it keeps, and what a part's failure costs."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checks.gpu import check as checks
from checks.gpu import child, process
from checks.gpu import tests as gpu_tests
from checks.gpu.check import PARTS, Part, check, check_machine
from checks.gpu.process import run
from checks.gpu.record import PartFailed, Record, Result
from checks.gpu.tests import counts, outcomes


class Clock:
    """Time that passes only while a part runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_parts_share_the_budget_and_a_short_one_fits_after_a_long_one_does_not(tmp_path: Path):
    clock, limits = Clock(), {}

    def run_part(part: Part, limit_s: float) -> Result:
        limits[part.name] = limit_s
        clock.now_s += min(70, limit_s)
        return Result("ok", seconds=min(70, limit_s))

    record = Record(tmp_path / "out.json", {})
    parts = [Part("a", 5, 60), Part("b", 5, 90), Part("c", 20, 90), Part("d", 5, 90)]
    check(record, parts, 140.0, run_part, clock)
    assert limits == {"a": 60, "b": 80, "d": 10}
    assert record.results["c"].status == "not run"
    assert record.results["c"].reason == "10 s of the budget are left, it takes at least 20"


def test_the_record_is_whole_after_every_part(tmp_path: Path):
    out, seen = tmp_path / "deep" / "out.json", []

    def run_part(part: Part, limit_s: float) -> Result:
        seen.append(sorted(json.loads(out.read_text())["parts"]))
        return Result("failed" if part.name == "b" else "ok", figures={"x": 1.5})

    record = Record(out, {"benchmark": "gpu"})
    check(record, [Part(name, 1, 1) for name in "abc"], 100.0, run_part)
    assert seen == [[], ["a"], ["a", "b"]]
    found = json.loads(out.read_text())
    assert (found["benchmark"], found["failed"]) == ("gpu", ["b"])
    assert found["parts"]["c"]["figures"] == {"x": 1.5}
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_a_budget_of_540_s_reaches_every_part():
    """If each takes all that it may, the last is still begun."""
    left_s = 540.0
    for part in PARTS:
        limit_s = part.limit_s(left_s)
        assert limit_s is not None, part.name
        left_s -= limit_s if part is not PARTS[-1] else 0
    assert {path.stem for path in Path(child.__file__).parent.glob("*.py")} >= {
        p.name for p in PARTS
    }


def test_what_is_not_installed_is_named_and_what_is_broken_fails(monkeypatch: pytest.MonkeyPatch):
    missing = ModuleNotFoundError("No module named 'sglang.srt'", name="sglang.srt")
    ours = ModuleNotFoundError("No module named 'checks.x'", name="checks.x")
    found = PartFailed("2 tests failed", {"counts": 3})

    def part(error: Exception) -> dict[str, object]:
        def measure(limit_s: float, *, dry: bool) -> dict[str, object]:
            raise error

        monkeypatch.setattr("checks.gpu.installed.measure", measure)
        return child.outcome("installed", 1.0, dry=True)

    assert part(missing) == {"status": "skipped", "reason": "needs sglang"}
    assert part(found) == {
        "status": "failed",
        "reason": "2 tests failed",
        "figures": {"counts": 3},
    }
    with pytest.raises(ModuleNotFoundError):
        part(ours)
    with pytest.raises(ZeroDivisionError):
        part(ZeroDivisionError())


def test_a_part_that_dies_is_recorded_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "checks" / "gpu").mkdir(parents=True)
    (tmp_path / "checks" / "gpu" / "child.py").write_text("print('one'); raise SystemExit('two')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = checks._in_child(Part("lean", 1, 9), 9.0, tmp_path, dry=True)
    assert (result.status, result.reason) == ("failed", "exit code 1")
    assert result.last_lines == ("one", "two")


def test_the_limit_ends_a_part_and_what_it_started(tmp_path: Path):
    code = """
import subprocess, sys
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
print(sleeper.pid, flush=True)
sleeper.wait()"""
    ended = run([sys.executable, "-c", code], tmp_path / "log", limit_s=3.0)
    assert ended.exit_code is None
    pid = int(ended.last_lines[0])
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and _runs(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """A zombie that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_parts_are_chosen_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_parts: list[str] = []

    def in_child(part: Part, limit_s: float, scratch: Path, *, dry: bool) -> Result:
        run_parts.append(part.name)
        return Result("ok")

    monkeypatch.setattr(checks, "_in_child", in_child)
    out = str(tmp_path / "out.json")
    found = check_machine(["--dry", "--out", out, "--parts", "run,lean"])
    assert run_parts == list(found["parts"]) == ["lean", "run"]
    with pytest.raises(SystemExit):
        check_machine(["--dry", "--out", out, "--parts", "lean,loan"])
    assert "loan is none of installed, tests, lean" in capsys.readouterr().err


def test_tests_are_told_apart_in_pytest_s_report(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="ok" time="1.5"/>'
        '<testcase classname="a" name="bad"><failure message="x">def f():\nE   assert 1 == 2'
        "</failure></testcase>"
        '<testcase name="tests/gpu/b.py"><error message="collection failure">'
        "E   ModuleNotFoundError: No module named 'megatron.core'</error></testcase>"
        '<testcase classname="c" name="d"><skipped message="needs a CUDA device"/></testcase>'
        "</testsuite></testsuites>"
    )
    tests = outcomes(report)
    assert counts(tests) == {"passed": 1, "failed": 1, "skipped": 2}
    assert [test["message"] for test in tests] == [
        None,
        "assert 1 == 2",
        "needs megatron",
        "needs a CUDA device",
    ]
    assert tests[0] == {"name": "a::ok", "outcome": "passed", "seconds": 1.5, "message": None}


@pytest.mark.parametrize(("begins", "passed"), [("test_quick", 1), ("pass", 0)])
def test_tests_that_ended_are_told_when_time_ends_another(
    begins: str, passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where it ends a file before its first test. The file asks for the end of its time."""
    for folder in ("tests/gpu", "checks/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "checks/gpu/pytest.ini").write_text("[pytest]\n")
    end = "open('late', 'w').close(); time.sleep(99)"
    if begins == "test_quick":
        program = f"import time\ndef test_quick():\n    pass\ndef test_slow():\n    {end}\n"
    else:
        program = f"import time\n{end}\n"
    (tmp_path / "tests/gpu/test_it.py").write_text(program)
    monkeypatch.chdir(tmp_path)

    class Late(threading.Thread):
        """In place of a timer: ends when the file says so."""

        def __init__(self, _: float, function: Callable[..., Any], arguments: list[Any]) -> None:
            super().__init__(daemon=True)
            self._end = partial(function, *arguments)

        def run(self) -> None:
            while not (tmp_path / "late").exists():
                time.sleep(0.05)
            self._end()

        def cancel(self) -> None:
            (tmp_path / "late").touch()

    monkeypatch.setattr(process.threading, "Timer", Late)
    with pytest.raises(PartFailed) as found:
        gpu_tests.measure(gpu_tests.END_S + 300.0, dry=False)
    assert found.value.reason.endswith("test_it: the next one: interrupted: time ended")
    assert found.value.figures["counts"] == {"passed": passed, "failed": 1, "skipped": 0}


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(checks, "has_gpu", lambda: False)
    with pytest.raises(SystemExit) as ended:
        check_machine(["--out", str(tmp_path / "out.json")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == checks.NO_GPU + "\n"
    assert os.listdir(tmp_path) == []


def test_draws_and_scores_have_figures_and_errors(monkeypatch: pytest.MonkeyPatch):
    from checks.gpu import sampling

    monkeypatch.setattr(sampling, "REPEATS", 1)
    found = sampling.measure(60.0, dry=True)
    others = {"sampler", "seeded", "mc_64_top_p", "mc_64_without_kernels", "mc_64_dense"}
    others |= {"one_pass"}
    assert set(found["decode_ms"]) == {*sampling.SUPPORTS, *others}
    times_ms = [*found["decode_ms"].values(), *found["score_ms"].values()]
    assert all(figures["ms_median"] > 0 for figures in times_ms)
    assert found["kernels"] is False
    assert 0 < found["errors"]["logp_nats"] < 1e-5
    assert found["errors"]["number_from_its_interval"] < 1e-6
