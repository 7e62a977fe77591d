"""Data files of hostile shapes, and their checksums."""

import json
import zlib

import pytest

from megatron_opd.data import files, lines
from megatron_opd.data.faults import Fault
from megatron_opd.data.files import data_crc32, located_rows


def rows(path):
    return list(located_rows(path, ("prompt",), ("prompt",)))


def test_windows_line_ends_and_a_byte_order_mark_are_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b\\r\\n"}\r\n')
    assert rows(path) == [(f"{path}:1", {"prompt": "a"}), (f"{path}:3", {"prompt": "b\r\n"})]


def test_a_mark_in_the_middle_is_a_fault(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\xef\xbb\xbf{"prompt": "b"}\n')
    assert [type(row) for row in rows(path)] == [tuple, Fault]


def test_a_line_that_is_too_long_is_one_fault(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    path = tmp_path / "a.jsonl"
    fits = json.dumps({"prompt": "x" * 85})
    assert len(fits) + 1 == 100
    long = [json.dumps({"prompt": "x" * length}) for length in (86, 500)]
    path.write_text("\n".join([fits, long[0], fits, long[1], fits]))
    found = rows(path)
    assert [type(row) for row in found] == [tuple, Fault, tuple, Fault, tuple]
    assert str(found[1]) == f"{path}:2: a line may have 100 bytes, this one has more"
    assert found[4][0] == f"{path}:5"


def test_checksums_are_those_of_all_files_in_order(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 4)
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_bytes(b"0123456789")
    other.write_bytes(b"abc")
    assert data_crc32([one, other]) == zlib.crc32(b"0123456789abc")
    assert data_crc32([other, one]) != data_crc32([one, other])
