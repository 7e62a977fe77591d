"""Sums of a checkpoint's files."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.checkpoint.state_files import (
    check_size,
    read_sums,
    sum_file,
    sums_name,
    write_sums,
)


def test_sums_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "b").write_bytes(b"")
    write_sums(tmp_path, 0, ["a"])
    write_sums(tmp_path, 1, ["b"])
    entries = read_sums(tmp_path, 2)
    assert entries == [sum_file(tmp_path, "a"), sum_file(tmp_path, "b")]
    assert [entry.size for entry in entries] == [10, 0]
    with pytest.raises(ValueError, match=sums_name(2)):
        read_sums(tmp_path, 3)
    for rows in ("5", "[5]", '[["a", 1]]', "[[1, 2, 3]]", "[" * 100_000):
        (tmp_path / sums_name(2)).write_text(rows)
        with pytest.raises(ValueError, match=f"cannot read {sums_name(2)}"):
            read_sums(tmp_path, 3)
    (tmp_path / "a").unlink()
    with pytest.raises(ValueError, match="a must have 10 bytes, it is missing"):
        check_size(tmp_path, entries[0])


@pytest.mark.parametrize(
    "row",
    [
        *(["../a", 1, 2], ["/a", 1, 2], ["", 1, 2], ["a\x1b[2J", 1, 2], ["b" * 300, 1, 2]),
        *(["a", True, 2], ["a", 1, -2], ["a", 1.0, 2], ["a", 1], 3, ["a" * 5000, {}, 2]),
    ],
)
def test_checksums_are_of_files_in_the_checkpoint(tmp_path: Path, row: Any):
    """Before: files elsewhere, true as a size, escape codes and 5,000 characters in the line."""
    (tmp_path / "sums-00000.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match="not a file name in it, a size and a checksum") as told:
        read_sums(tmp_path, 1)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 1000
