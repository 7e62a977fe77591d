"""Finds the files that a data path names: one, those of a folder, or those that fit a pattern.

Invariant: the files are of one kind and in the order of their names, and none that may hold rows is
left out in silence.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import NamedTuple

from megatron_opd.config.wording import shown
from megatron_opd.data.values import listed

LINES, VALUES, PARQUET, CSV = "lines", "values", "parquet", "csv"
KINDS = {".jsonl": LINES, ".ndjson": LINES, ".json": VALUES, ".parquet": PARQUET, ".csv": CSV}
PACKED = {".gz": "gzip", ".zst": "zstd"}
BESIDE = re.compile(r"[._].*|readme.*|licen[cs]e.*|.*\.md|dataset_infos?\.json", re.IGNORECASE)
"""Names of the files that lie beside rows and hold none."""
SPLIT = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)


class Kind(NamedTuple):
    """Says how a file is read. packing: the compression that pyarrow is told, or None."""

    name: str
    packing: str | None


def kind_of(path: Path) -> Kind | None:
    """Return how a file of that name is read; None for one that is no data file."""
    *_, last = ("", *path.suffixes)
    packing = PACKED.get(last.lower())
    inner = path.with_suffix("") if packing else path
    name = KINDS.get(inner.suffix.lower())
    if name is None or (packing and name == PARQUET):  # parquet is compressed inside
        return None
    return Kind(name, packing)


def is_pattern(path: Path) -> bool:
    """Tell whether a data path is a pattern such as data/train-*.parquet."""
    return glob.has_magic(str(path)) and not path.exists()


def is_there(path: Path) -> bool:
    """Tell whether a path or pattern names anything on this machine."""
    if not is_pattern(path):
        return path.exists()
    return next(glob.iglob(str(path), recursive=True), None) is not None


def data_files(path: Path) -> list[Path]:
    """Return the data files of a file, a folder or a pattern, in the order of their names.

    ValueError (one line): there are none, or what they hold is not clear.
    """
    if is_pattern(path):
        found = [Path(each) for each in glob.glob(str(path), recursive=True)]
        if not found:
            raise ValueError(f"data file not found: no file fits {path}")
        files = _rows_alone(path, found)
        folders = [each for each in files if each.is_dir()]
        if folders:
            raise ValueError(
                f"{path} fits the folder {folders[0]}: give a pattern of files, such as "
                f"{path}/*.parquet"
            )
    elif path.is_dir():
        files = _rows_alone(path, list(path.iterdir()))
        folders = [each.name for each in files if each.is_dir()]
        if folders:
            raise ValueError(
                f"{path} holds the folders {listed(folders)}: name one of them, or give a pattern "
                f"of files, such as {path}/*/*.parquet"
            )
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"data file not found: {path}")
    return _of_one_kind(path, files)


def _rows_alone(path: Path, found: list[Path]) -> list[Path]:
    files = sorted(each for each in found if not BESIDE.fullmatch(each.name))
    if not files:
        raise ValueError(f"{path} holds no data files ({', '.join(KINDS)}, or one of them + .gz)")
    return files


def _of_one_kind(path: Path, files: list[Path]) -> list[Path]:
    kinds = {kind_of(file): file for file in reversed(files)}
    if None in kinds:
        of_many = f" of {path}" if kinds[None] != path else ""
        raise ValueError(
            f"{kinds[None]}{of_many}: data files end with {', '.join(KINDS)}, or one of the text "
            f"kinds + {' or '.join(PACKED)}"
        )
    if len(kinds) > 1:
        one, other, *_ = sorted(file.name for file in kinds.values())
        raise ValueError(
            f"{path} holds files of several kinds, such as {shown(one)} and {shown(other)}: give "
            "a pattern of one kind, such as DIR/*.parquet"
        )
    named = (SPLIT.search(file.name) for file in files)
    splits = {each.group().lower() for each in named if each is not None}
    if len(splits) > 1:
        raise ValueError(
            f"{path} holds the splits {listed(sorted(splits))}: give a pattern of one, such as "
            f"DIR/{next(iter(sorted(splits)))}-*{files[0].suffix}"
        )
    return files
