"""What may be deleted: never what a version that stays is based on, or a server may still need."""

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.weight_sync.disk_versions import Stream, error_text, left_behind, needed
from sglang_bridge.weights.manifest import version_name


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_what_is_needed_holds_its_bases_and_all_since_the_last_that_was_taken(seed: int, keep: int):
    rng = random.Random(seed)
    bases: dict[str, str | None] = {}
    for i in range(rng.randint(0, 12)):
        last = next(reversed(bases), None)
        bases[version_name(i, i)] = last if rng.random() < 0.7 else None
    names = list(bases)
    taken = rng.choice([None, *names])
    kept = needed(bases, keep, taken)
    assert kept <= bases.keys()
    assert kept >= set(names[-keep:])
    since = 0 if taken is None else names.index(taken)
    assert kept >= set(names[since:])
    assert {bases[name] for name in kept} - {None} <= kept
    wanted = {*names[-keep:], *names[since:]}
    for name in kept - wanted:  # only for somebody's sake
        assert any(bases[other] == name for other in kept)


def test_a_version_that_is_gone_counts_as_taken_by_nobody():
    bases = {version_name(i, i): None for i in range(3)}
    assert needed(bases, 1, version_name(9, 9)) == bases.keys()


def test_one_that_is_being_deleted_has_lost_its_name_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stream = Stream(tmp_path / "w", "run-0123456789ab")
    stream.make("me")
    old, new = (version_name(i, i) for i in (0, 1))
    for name in (old, new):
        (stream.path / name).mkdir()
        (stream.path / name / "file").write_text("x")

    with monkeypatch.context() as patch:  # as if a reader had its files open
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        stream.keep([new])
    assert {entry.name for entry in stream.path.iterdir()} == {"owner", f"{old}.removed", new}
    stream.keep([new])
    assert {entry.name for entry in stream.path.iterdir()} == {"owner", new}
    assert left_behind(tmp_path / "w") == [stream.path]
    assert left_behind(tmp_path / "none") == []
    (stream.path / "notes.txt").write_text("somebody's")
    stream.remove()
    assert {entry.name for entry in stream.path.iterdir()} == {"notes.txt"}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "/d/f: disk full: free some space in weight_sync.directory, or lower wei"),
        (errno.EDQUOT, "/d/f: disk full: free"),
        (errno.EROFS, "/d/f: read-only file system: weight_sync.directory must be a directory"),
    ],
)
def test_a_failure_names_path_and_remedy(number: int, said: str):
    for error in (
        OSError(number, os.strerror(number)),
        OSError(number, os.strerror(number), "/d/f"),
    ):
        assert error_text(error, Path("/d/f")).startswith(said)
