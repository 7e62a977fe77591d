"""Tests stand where their sources stand: tests/unit/<package>/test_<module>.py."""

import ast
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tools.house import AROUND

UNIT = ROOT / "tests" / "unit"
TOPS = ("sglang_bridge", *AROUND, "tools", "examples")  # all else is of megatron_opd
THEMES = {
    "metrics/test_full_disk.py",  # what every writer of a run does on a full disk
}
HELPERS = "tests/support (tests/dist and tests/e2e keep their own beside their tests)"


def source_of(folder: Path) -> Path:
    """The folder of sources that a folder below tests/unit stands for."""
    parts = folder.relative_to(UNIT).parts
    return ROOT.joinpath(*parts if parts and parts[0] in TOPS else ("megatron_opd", *parts))


def misplaced(test: Path) -> str | None:
    """What is wrong with where `test` is: test_<module>.py, or test_<module>_<aspect>.py."""
    name = test.relative_to(UNIT).as_posix()
    if name.startswith("repository/") or name in THEMES:
        return None
    folder = source_of(test.parent)
    if not folder.is_dir():
        return f"{name}: there is no {folder.relative_to(ROOT)}"
    words = test.stem.removeprefix("test_").split("_")
    for end in range(len(words), 0, -1):
        module = folder / "_".join(words[:end])
        if module.is_dir() or module.with_suffix(".py").is_file():
            return None
    return f"{name}: {folder.relative_to(ROOT)} has no such module"


def test_every_unit_test_stands_where_its_source_stands():
    assert [why for test in sorted(UNIT.rglob("test_*.py")) if (why := misplaced(test))] == []
    assert all((UNIT / theme).is_file() for theme in THEMES)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("losses/test_lean.py", None),
        ("sglang_bridge/server/test_draws.py", None),
        ("sglang_bridge/test_parse_refusals.py", None),
        ("test_evaluation.py", None),
        ("bridge/test_draws.py", "bridge/test_draws.py: there is no megatron_opd/bridge"),
        ("losses/test_lea.py", "losses/test_lea.py: megatron_opd/losses has no such module"),
    ],
)
def test_what_is_misplaced_is_named(name: str, why: str | None):
    assert misplaced(UNIT / name) == why


def test_helpers_are_not_in_test_files():
    borrowed = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and ".test_" in node.module:
                borrowed.append(f"{path.relative_to(ROOT)} imports {node.module}")
    assert not borrowed, f"helpers belong into {HELPERS}"
