"""A study names the commit that its runs are of."""

import subprocess
from pathlib import Path

import pytest

from harness import tree


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "rows.jsonl").write_text("{}\n")
    (tmp_path / "code.py").write_text("x = 1\n")
    person = ["-c", "user.name=n", "-c", "user.email=e"]
    for arguments in (["init", "-q"], ["add", "-A"], [*person, "commit", "-qm", "one"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(tree, "ROOT", tmp_path)
    return tmp_path


def test_rows_that_are_being_written_leave_a_tree_clean(checkout: Path):
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert tree.clean_commit() == tree.marked_commit() == head
    (checkout / "benchmarks" / "results" / "rows.jsonl").write_text("{}\n{}\n")
    (checkout / "runs").mkdir()
    assert tree.clean_commit() == head


@pytest.mark.parametrize("staged", [False, True])
def test_changed_code_is_refused_or_marked(checkout: Path, staged: bool):
    (checkout / "code.py").write_text("x = 2\n")
    if staged:
        subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    with pytest.raises(tree.DirtyTree, match="commit or stash them, or add --dirty"):
        tree.clean_commit()
    assert tree.marked_commit().endswith("-dirty")
