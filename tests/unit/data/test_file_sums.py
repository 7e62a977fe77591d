"""Which files count as added to, and which as changed."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_opd.data.file_sums import FileDifference, sums_of

ROW, OTHER = '{"prompt": "a"}\n', '{"prompt": "b"}\n'
NONE, GROWN, CHANGED = FileDifference.NONE, FileDifference.GROWN, FileDifference.CHANGED


def difference(path: Path, change: Callable[[], object]) -> FileDifference:
    """What is found after a change, and that nothing was found before it."""
    old, _ = sums_of(path)
    assert sums_of(path, old) == (old, NONE)
    change()
    return sums_of(path, old)[1]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (ROW, ROW + OTHER, GROWN),
        (ROW, ROW + "\n", GROWN),
        (ROW.strip(), ROW + OTHER, GROWN),
        (ROW.strip(), ROW.strip() + "\r\n" + OTHER, GROWN),
        (ROW.strip(), ROW.strip() + " " + OTHER, CHANGED),
        (ROW + '{"prompt": "a', ROW + '{"prompt": "ab"}\n', CHANGED),
        (ROW + OTHER, ROW, CHANGED),
        (ROW + OTHER, OTHER + ROW, CHANGED),
        (ROW + OTHER, ROW + ROW + OTHER, CHANGED),
        ("", ROW, GROWN),
    ],
)
def test_lines_at_the_end_are_rows_that_were_added(tmp_path, before, after, expected):
    for name in ("a.jsonl", "a.csv", "a.json"):
        file = tmp_path / name
        file.write_text(before)
        assert difference(file, lambda file=file: file.write_text(after)) is expected


def test_packed_files_and_tables_change_as_a_whole(tmp_path: Path):
    packed, table = tmp_path / "a.jsonl.gz", tmp_path / "a.parquet"
    packed.write_bytes(gzip.compress(ROW.encode()))
    more = packed.read_bytes() + gzip.compress(OTHER.encode())
    assert difference(packed, lambda: packed.write_bytes(more)) is CHANGED
    packed.write_bytes(b"as if packed\n")  # whatever byte is its last
    assert difference(packed, lambda: packed.write_bytes(b"as if packed\nand more")) is CHANGED

    def write(*rows: str):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": list(rows)}), table)

    write("a")
    assert difference(table, lambda: write("a", "b")) is CHANGED


def test_shards_are_added_at_the_end(tmp_path: Path):
    def shards(**named: str) -> None:
        for old in tmp_path.iterdir():
            old.unlink()
        for name, content in named.items():
            (tmp_path / f"{name}.jsonl").write_text(content)

    def found(**named: str) -> FileDifference:
        shards(b=ROW, d=OTHER)
        return difference(tmp_path, lambda: shards(**named))

    assert found(b=ROW, d=OTHER, e=ROW) is GROWN
    assert found(b=ROW, d=OTHER + ROW, e=ROW) is GROWN
    assert found(part_0=ROW, part_1=OTHER, part_2=ROW) is GROWN, "by content, not by name"
    assert found(b=ROW, c=ROW, d=OTHER) is CHANGED
    assert found(b=ROW + ROW, d=OTHER) is CHANGED
    assert found(a=OTHER, b=ROW, d=OTHER) is CHANGED
    assert found(b=ROW) is CHANGED


def test_rows_of_a_function_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rows_of_test.py").write_text("ROWS = [{'prompt': 'a'}]\nrows = lambda: ROWS\n")
    import own_rows_of_test  # pyright: ignore[reportMissingImports]

    rows, source = own_rows_of_test.ROWS, Path("own_rows_of_test:rows")
    assert difference(source, lambda: rows.append({"prompt": "b"})) is GROWN
    assert difference(source, lambda: rows.reverse()) is CHANGED
