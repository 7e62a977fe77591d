"""JSON, CSV and compressed files -> rows, as an obvious reader of whole files has them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from random import Random
from typing import Any

import pyarrow

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, one_of
from checks.fuzz.places import written
from checks.fuzz.targets.jsonl import FILES, ROWS, damaged_rows
from megatron_opd.data.faults import Fault
from megatron_opd.data.files import NOT_LINES, located_rows

Given = tuple[str, bytes]
WANTED = ("prompt", "answer")


def zstd(content: bytes) -> bytes:
    """A frame of Zstandard."""
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


def comma(rows: list[dict[str, Any]]) -> bytes:
    """A CSV file."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "answer", "who"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


CORPUS = {
    ".json": [json.dumps(ROWS, indent=2).encode(), json.dumps(ROWS).encode(), FILES[0], b"[]"],
    ".csv": [comma(ROWS), b"\xef\xbb\xbf" + comma(ROWS[:1]), b"prompt\na\n\nb\n"],
    ".jsonl.gz": [gzip.compress(FILES[0]), gzip.compress(FILES[1]) + gzip.compress(FILES[2])],
    ".jsonl.zst": [zstd(FILES[0]), zstd(FILES[1]) + zstd(FILES[2])],
    ".jsonl": FILES,
}
PACKERS = {".jsonl.gz": gzip.compress, ".jsonl.zst": zstd, ".jsonl": bytes, ".json": bytes}


def make(rng: Random) -> Given:
    """A file of one kind, damaged outside or, where it is compressed, inside."""
    suffix = rng.choice(list(CORPUS))
    if suffix in PACKERS and rng.random() < 0.4:
        return suffix, PACKERS[suffix](one_of(damaged_rows, damaged_bytes(FILES))(rng))
    return suffix, damaged_bytes(CORPUS[suffix])(rng)


def call(given: Given) -> list[Any]:
    """Read all rows."""
    suffix, data = given
    return list(located_rows(written(f"rows{suffix}", data), WANTED, WANTED[:1]))


def oracle(given: Given, found: list[Any]) -> str | None:
    """The rows are those of a reader that has the whole file in memory."""
    suffix, data = given
    rows = [None if isinstance(row, Fault) else row[1] for row in found]
    if suffix == ".csv":
        return _csv(data, rows)
    if suffix == ".jsonl.gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error):
            return "a damaged gzip file is read"
    if suffix == ".jsonl.zst":
        return None if all(row is None or isinstance(row, dict) for row in rows) else "no row"
    if suffix == ".json" or NOT_LINES.match(data):
        return None if repr(rows) == repr(_values(data)) else "a row is changed, lost or made up"
    expected = [_line(text, number) for number, text in enumerate(data.split(b"\n"))]
    same = repr(rows) == repr([row for row in expected if row != ""])
    return None if same else "a row is changed or lost"


def _line(text: bytes, number: int) -> Any:
    """The row of a line, None for a fault, "" for a blank one."""
    try:
        decoded = text.decode("utf-8-sig" if number == 0 else "utf-8")
        return _row(json.loads(decoded, object_pairs_hook=_once)) if decoded.strip() else ""
    except (ValueError, RecursionError):
        return None


def _row(value: Any) -> Any:
    return value if isinstance(value, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> Any:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("twice")
    return dict(pairs)


def _values(data: bytes) -> list[Any] | None:
    """The rows of an array or of one value after another; None: it is no JSON."""
    text, decoder, place, rows = data.decode("utf-8-sig"), json.JSONDecoder(), 0, []
    spans: list[str] = []
    blanks = " \t\r\n"
    text = text.strip(blanks)
    array = text.startswith("[")
    if array:
        whole = json.loads(text)
        text = text[1:]
    while text.strip(blanks) and not (array and text.lstrip(blanks)[place:] == "]"):
        text = text.lstrip(blanks).removeprefix("," if array and spans else "").lstrip(blanks)
        _, end = decoder.raw_decode(text)
        spans.append(text[:end])
        text = text[end:]
    if array and len(whole) != len(spans):
        return None
    for span in spans:
        try:
            rows.append(_row(json.loads(span, object_pairs_hook=_once)))
        except ValueError:
            rows.append(None)
    return rows


def _csv(data: bytes, rows: list[Any]) -> str | None:
    """Where nothing is quoted, a row is a line whose fields are between commas."""
    if b'"' in data or b"\r" in data.replace(b"\r\n", b""):
        return None
    lines = data.decode("utf-8-sig", "replace").replace("\r\n", "\n").split("\n")
    names, *texts = [line.split(",") for line in lines if line]
    plain = [{n: v or None for n, v in zip(names, text, strict=True)} for text in texts]
    expected = [{key: row[key] for key in WANTED if key in row} for row in plain]
    return None if rows == expected else "a row is changed or lost"


TARGET = Target("data_files", make, call, (ValueError,), oracle, share=2)
