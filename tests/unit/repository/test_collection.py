"""No folder of tests is passed over: pytest's own default skips folders named `dist`."""

from fnmatch import fnmatch

import pytest

from tests.support.paths import ROOT

TESTS = ROOT / "tests"


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config):
    folders = {path.parent.name for path in TESTS.rglob("test_*.py")}
    assert {"repository", "dist", "e2e", "gpu"} <= folders
    skipped = pytestconfig.getini("norecursedirs")
    passed_over = {name for name in folders for rule in skipped if fnmatch(name, rule)}
    assert not passed_over
