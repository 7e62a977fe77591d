"""Names the columns of data files that no key leads to: a prompt may lack what stands in them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, cast

from megatron_opd.data.faults import Unusable
from megatron_opd.data.files import files_of, is_data_set, is_source
from megatron_opd.data.key_paths import column_of
from megatron_opd.data.lines import chunks_of, json_row, value_lines
from megatron_opd.data.shards import CSV, PARQUET, kind_of


def unread_columns(path: Path, wanted: Sequence[str]) -> list[str]:
    """Return the columns of a data path's first row or table that `wanted` leads to none of.

    What cannot be read has none: those who read its rows say why.
    """
    try:
        present = _columns(path)
    except (ValueError, OSError, Unusable, csv.Error):
        return []
    read = {column_of(present, key) for key in wanted}
    return [name for name in present if name not in read]


def _columns(path: Path) -> list[str]:
    if is_source(path):
        return []  # it would be called once more, and its columns are the user's choice
    file = files_of(path)[0]
    import pyarrow
    from pyarrow import parquet

    if is_data_set(path):
        with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) as reader:
            return reader.schema.names
    kind = kind_of(file)
    assert kind is not None
    if kind.name == PARQUET:
        return parquet.read_schema(file).names
    with cast(BinaryIO, pyarrow.input_stream(str(file), compression=kind.packing)) as stream:
        if kind.name == CSV:
            return next(csv.reader(TextIOWrapper(stream, "utf-8-sig", newline="")), [])
        return list(json_row(next(value_lines(file, chunks_of(stream)), b"{}").decode()))
