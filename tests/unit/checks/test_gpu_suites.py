"""The suites on the GPU environment's versions: what came of them, and what is left out."""

from pathlib import Path

import pytest

from checks import gpu_suites
from checks.gpu_suites import DESELECTED, run_suite, summary
from tests.support.paths import ROOT

TESTS = """
import pytest

def test_sound(): pass

def test_other(): assert 1 == 2

@pytest.mark.skip(reason="no card")
def test_card(): pass
"""


def suite(place: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a suite of one file comes to, in a process of its own without the learner."""
    (place / "test_planted.py").write_text(text)
    monkeypatch.setattr(gpu_suites, "SUITES", {"planted": str(place)})
    monkeypatch.setattr(gpu_suites, "FIRST", ("-c", "/dev/null", "--rootdir", str(place)))
    monkeypatch.setattr(gpu_suites, "OPTIONS", ("-q",))
    return run_suite("planted", place, {"PATH": "/usr/bin:/bin"})


def test_what_passed_failed_and_was_skipped_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = suite(tmp_path, TESTS, monkeypatch)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["skipped"] == {"no card": 1}
    assert found["failed"] == ["test_planted::test_other: assert 1 == 2"]


def test_files_that_do_not_import_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = suite(tmp_path, "import no_such_package", monkeypatch)
    assert found["failed"] == ["pytest ended with 2"]


def test_what_is_left_out_exists_and_has_a_reason():
    for test, reason in DESELECTED.items():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
        assert len(reason) > 20
    assert summary([]) == {"counts": dict.fromkeys(("passed", "failed", "skipped"), 0),
                           "skipped": {}, "failed": []}  # fmt: skip
