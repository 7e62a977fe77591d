"""One driver for checks, studies and benchmarks."""

import json
import sys

import pytest

from benchmarks import learner, step
from harness import driver
from harness.driver import PACKAGES, cases, main, table


def test_options_reach_the_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(step, "measure", lambda options: {"options": options})
    assert main("benchmarks", ["step", "--size", "tiny"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["options"] == ["--size", "tiny"]
    assert printed["command"] == "python -m benchmarks step --size tiny"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["learner", "--size"], "unknown options ['--size']: learner takes none"),
        (["step", "learner", "--size"], "options ['--size'] need one NAME"),
        (["nothing"], "unknown name 'nothing'; choices: "),
    ],
)
def test_what_cannot_be_run_is_named(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture
):
    with pytest.raises(SystemExit, match="2"):
        main("benchmarks", arguments)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("failed", [[], ["x"]])
def test_a_case_that_failed_is_the_exit_code(failed: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner, "measure", lambda: {"failed": failed})
    assert main("benchmarks", ["learner"]) == len(failed)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["findings", "--budget-s", "0"],
            "findings is one of the studies: python -m studies findings --budget-s 0\n",
        ),
        (["chaos"], "chaos is one of the checks: python -m checks chaos\n"),
    ],
)
def test_a_name_of_another_package_is_answered_with_the_new_command(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture
):
    assert main("benchmarks", arguments) == 2
    assert capsys.readouterr().err == line
    assert arguments[0] not in sys.modules


def test_without_a_name_the_cases_are_listed(capsys: pytest.CaptureFixture):
    assert main("checks", []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(cases("checks"))


@pytest.mark.parametrize("name", ["fuzz", "layouts"])
def test_help_is_that_of_the_case(name: str, capsys: pytest.CaptureFixture):
    """Before: that of the driver, and the options of a case were told nowhere."""
    assert main("checks", [name, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(table("checks")[name])
    assert ("usage: python -m checks fuzz" in said) == ("--target" in said) == (name == "fuzz")


def test_every_case_has_one_place_and_says_in_one_line_what_it_is():
    names = [name for package in PACKAGES for name in cases(package)]
    assert len(names) == len(set(names)) > 50
    lines = [line for package in PACKAGES for line in table(package).values()]
    assert all(line.endswith((".", "`.")) for line in lines)
    assert {"fuzz", "gpu", "watched_demo"} <= set(cases("checks"))
    assert "grid" not in cases("studies")


def test_a_module_without_measure_is_no_case(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "checks" / "deep").mkdir(parents=True)
    (tmp_path / "checks" / "a.py").write_text("def measure():\n    pass\n")
    (tmp_path / "checks" / "b.py").write_text("def measured():\n    pass\n")
    (tmp_path / "checks" / "deep" / "__init__.py").write_text("def measure(\n): ...\n")
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    assert list(cases("checks")) == ["a", "deep"]
