"""Appended files: complete lines once each, whatever the writer does meanwhile."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.report.appended import AppendedLines, AppendedRows


def contents(found) -> list[bytes]:
    return [line.content for line in found.lines]


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(content)


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"-")), max_size=9),
    cuts=st.lists(st.integers(0, 90), max_size=9),
    most=st.integers(10, 40),
)
def test_every_line_is_returned_once_however_it_is_written(tmp_path_factory, lines, cuts, most):
    path = tmp_path_factory.mktemp("a") / "rows"
    whole = b"".join(line + b"\n" for line in lines)
    reader, seen = AppendedLines(path), []
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    for start, stop in pairwise(edges):
        append(path, whole[start:stop])
        more = True
        while more:
            found = reader.read(most)
            assert not found.started_over
            seen += found.lines
            more = found.more
    assert [line.content for line in seen] == lines
    assert all(whole[line.offset :].startswith(line.content + b"\n") for line in seen)


def test_a_missing_file_has_no_lines_and_may_come_later(tmp_path: Path):
    reader = AppendedLines(tmp_path / "rows")
    assert contents(reader.read()) == []
    append(tmp_path / "rows", b"a\n")
    assert contents(reader.read()) == [b"a"]


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path):
    path = tmp_path / "rows"
    append(path, b"one\ntw")
    reader = AppendedLines(path)
    first = reader.read()
    assert (contents(first), first.more) == ([b"one"], False)
    assert contents(reader.read()) == []
    append(path, b"o\n")
    assert contents(reader.read()) == [b"two"]


@pytest.mark.parametrize(
    "content", [b"a\n", b"x\nb\n", b"a\nB\nc\nd\n", b""], ids=["cut", "new", "same-length", "empty"]
)
def test_a_file_that_was_replaced_is_read_from_its_begin(tmp_path: Path, content: bytes):
    path = tmp_path / "rows"
    path.write_bytes(b"a\nb\nc\n")
    reader = AppendedLines(path)
    assert len(reader.read().lines) == 3
    path.write_bytes(content)  # in place: the inode stays
    found = reader.read()
    assert found.started_over
    assert contents(found) == content.split(b"\n")[:-1]
    assert not reader.read().started_over


def test_a_long_file_whose_last_rows_were_replaced_is_read_from_its_begin(tmp_path: Path):
    path = tmp_path / "rows"
    kept = b"".join(b"row %d\n" % i for i in range(100))
    path.write_bytes(kept + b"old row\n")
    reader = AppendedLines(path)
    assert len(reader.read().lines) == 101
    path.write_bytes(kept + b"new row\nrow\n")  # rolled back by an update, and grown again
    found = reader.read()
    assert found.started_over
    assert len(found.lines) == 102


def test_a_file_that_goes_away_is_said_once(tmp_path: Path):
    path = tmp_path / "rows"
    path.write_bytes(b"a\n")
    reader = AppendedLines(path)
    reader.read()
    path.unlink()
    assert [reader.read().started_over for _ in range(2)] == [True, False]


def test_an_endless_line_is_skipped(tmp_path: Path):
    path = tmp_path / "rows"
    append(path, b"x" * 100)
    reader = AppendedLines(path)
    found = reader.read(16)
    assert (contents(found), found.more) == ([], False)
    append(path, b"\nshort\n")
    assert contents(reader.read(16)) == []
    assert contents(reader.read(16)) == [b"short"]


def test_rows_that_are_no_objects_are_counted_and_left_out(tmp_path: Path):
    path = tmp_path / "rows"
    bad = [b"{", b"[1]", b"\xff", b"[" * 100_000, b""]
    path.write_bytes(b'{"a": 1}\n' + b"\n".join(bad) + b'\n{"a": 2}\n{"a"')
    found = AppendedRows(path).read()
    assert [row["a"] for row in found.rows] == [1, 2]
    assert found.damaged == len(bad)
    assert path.read_bytes()[found.offsets[1] :].startswith(b'{"a": 2}')


def test_all_rows_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rows"
    path.write_text("".join(f"{json.dumps({'a': i})}\n" for i in range(100)))
    reader = AppendedRows(path)
    lines = reader._lines
    read, calls = lines.read, []

    def few(most_bytes: int):
        calls.append(most_bytes)
        return read(32)

    monkeypatch.setattr(lines, "read", few)
    found = reader.read_all()
    assert [row["a"] for row in found.rows] == list(range(100))
    assert len(set(found.offsets)) == 100
    assert len(calls) > 10
