"""Reads the files that W&B keeps of an offline run: a log of records in LevelDB's format."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32_768
HEAD = 7  # of the file, and of each part of a record: checksum, length, kind
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file; one that was cut short is left out."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, record = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:  # no part begins at the end of a block
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (WHOLE, LAST):
            yield record
            record = b""


def recorded(directory: Path) -> list[dict[str, Any]]:
    """What the .wandb files of a run's directory hold, by attempt: the run and its rows."""
    from wandb.proto import wandb_internal_pb2

    found: list[dict[str, Any]] = []
    paths = directory.glob("wandb/*run-*/*.wandb")
    for path in sorted(paths, key=lambda p: p.stat().st_mtime_ns):
        about: dict[str, Any] = {}
        rows: list[dict[str, Any]] = []
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run" and not about:
                run = record.run
                about = {"id": run.run_id, "project": run.project, "group": run.run_group}
                about |= {"name": run.display_name, "tags": list(run.tags)}
                about["config"] = {_key(i): json.loads(i.value_json) for i in run.config.update}
            elif kind == "history":
                rows.append({_key(i): json.loads(i.value_json) for i in record.history.item})
        found.append(about | {"rows": rows})
    return found


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)
