"""Columns that no key names are told, whatever kind of file holds them."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megatron_opd.data.unread_columns import unread_columns

FLAT = {"prompt": "a", "system": "b", "extra.id": "7", "at": "c"}
LINE = json.dumps(FLAT).encode() + b"\n"
TABLE = pyarrow.BufferOutputStream()
parquet.write_table(pyarrow.Table.from_pylist([FLAT]), TABLE)
KINDS = {
    "a.jsonl": LINE * 2,
    "a.ndjson.gz": gzip.compress(b"\n" + LINE),
    "a.json": json.dumps([FLAT], indent=1).encode(),
    "a.jsonl.zst": pyarrow.Codec("zstd").compress(LINE, asbytes=True),
    "a.csv": b"\xef\xbb\xbfprompt,system,extra.id,at\na,b,7,c\n",
    "a.csv.gz": gzip.compress(b"prompt,system,extra.id,at\r\na,b,7,c\r\n"),
    "a.parquet": TABLE.getvalue().to_pybytes(),
}


@pytest.mark.parametrize("name", KINDS)
def test_columns_that_no_key_leads_to(name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_bytes(KINDS[name])
    for given in (path, tmp_path, tmp_path / "a.*"):
        assert unread_columns(given, ["prompt", "answer", "at.of"]) == ["system", "extra.id"]
        assert unread_columns(given, ["extra.id", "prompt"]) == ["system", "at"]


def test_what_cannot_be_read_has_no_columns(tmp_path: Path):
    for name, content in (("a.jsonl", b"{"), ("a.json", b"["), ("a.parquet", b""), ("a.csv", b"")):
        (tmp_path / name).write_bytes(content)
        assert unread_columns(tmp_path / name, ["prompt"]) == []
    assert unread_columns(tmp_path / "none.jsonl", ["prompt"]) == []
