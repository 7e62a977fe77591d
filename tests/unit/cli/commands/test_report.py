"""`opd report`: a file for what can be read, one line for what cannot."""

import sys
from pathlib import Path

import pytest

from megatron_opd.cli.commands.report import DEFAULT
from megatron_opd.cli.main import main
from tests.support.cli_cases import refused
from tests.support.report_runs import written


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run", 12, {})


def test_the_report_is_one_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted(path.name for path in tmp_path.iterdir())
    out = tmp_path / "here.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out == f"report: {out} (0.1 MB)\n"
    assert main(["report", str(run), "--out", str(out)]) == 0  # replaced
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["here.html", *before])


def test_without_a_name_it_is_written_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run", str(written(tmp_path / "other"))]) == 0
    assert "Runs side by side" in DEFAULT.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ("opd report: ", "nowhere: there is no such directory")),
        (["run/metrics.jsonl"], ("is a file",)),
        (["empty"], ("is not a run's directory",)),
        (["new"], ("no update yet",)),
        (["run", "run"], ("run is given twice",)),
        (["run", "-o", "none/r.html"], ("-o none/r.html: there is no directory none",)),
        (["run", "-o", "run/summary.json"], ("-o must end in .html",)),
        (["run", "-o", "folder.html"], ("-o must be a file, folder.html is a directory",)),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: tuple[str, ...],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.html").mkdir()
    written(tmp_path / "new", 0)
    summary = (run / "summary.json").read_bytes()
    refused(capsys, main(["report", *arguments]), *words)
    assert not DEFAULT.exists()
    assert (run / "summary.json").read_bytes() == summary


def test_a_file_that_cannot_be_replaced_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(Path, "replace", full)
    code = main(["report", str(run), "-o", str(tmp_path / "r.html")])
    refused(capsys, code, "r.html cannot be written: No space left on device")
    assert sorted(tmp_path.iterdir()) == before


def test_help_does_not_load_the_report(run: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("megatron_opd.report")]:
        monkeypatch.delitem(sys.modules, name)  # they come back afterwards
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "megatron_opd.report.page" not in sys.modules
