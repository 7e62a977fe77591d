"""Finds the files that a data path names: one, those of a folder, or those that fit a pattern.

Invariant: the files are of one kind and in the order of their names, and none that may hold rows is
left out in silence.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from pathlib import Path
from typing import NamedTuple

from megatron_opd.config.wording import listed, shown
from megatron_opd.models.file_kinds import is_pointer, pointer_line

LINES, VALUES, PARQUET, CSV = "lines", "values", "parquet", "csv"
KINDS = {".jsonl": LINES, ".ndjson": LINES, ".json": VALUES, ".parquet": PARQUET, ".csv": CSV}
PACKED = {".gz": "gzip", ".zst": "zstd"}
BESIDE = re.compile(r"[._].*|readme.*|licen[cs]e.*|.*\.md|dataset_infos?\.json", re.IGNORECASE)
"""Names of the files that lie beside rows and hold none."""
SPLIT = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)

PART = re.compile(r"(.*-)([0-9]{5,9})-of-([0-9]{5,9})(.*)")
"""How writers of data sets name one of several parts: train-00000-of-00003.parquet."""


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
    files = _of_one_kind(path, files)
    for file in files:
        if is_pointer(file):
            raise ValueError(pointer_line(file))
    if files != [path]:
        _check_parts(path, files)
    return files


def _check_parts(path: Path, files: list[Path]) -> None:
    """Raise ValueError if some of several parts lack, or if files were written twice.

    Parts that a pattern leaves out are not meant. They count from 0, or from 1.
    """
    found: dict[tuple[Path, str, str], dict[str, set[int]]] = {}
    for file in files:
        if part := PART.fullmatch(file.name):
            parts = found.setdefault((file.parent, part[1], part[4]), {})
            parts.setdefault(part[3], set()).add(int(part[2]))
    for (folder, before, behind), by_count in found.items():
        if len(by_count) > 1:
            raise ValueError(
                f"{path} holds parts of {' and of '.join(sorted(by_count))} files named "
                f"{before}...{behind}: give a pattern of one, such as "
                f"{before}*-of-{min(by_count)}{behind}"
            )
        for count, numbers in by_count.items():
            first = int(0 not in numbers and int(count) in numbers)
            every = range(first, first + int(count))
            lacking = next((n for n in every if n not in numbers), None)
            if lacking is None:
                continue
            name = f"{before}{lacking:0{len(count)}}-of-{count}{behind}"
            if _means(path, folder / name):
                raise ValueError(
                    f"{path} lacks {name}; {len(numbers)} of {int(count)} parts are there: fetch "
                    "the others, or give a pattern of those that are meant"
                )


def _means(path: Path, file: Path) -> bool:
    """Return whether a folder or pattern would take a file, if it were there."""
    return path.is_dir() or fnmatch.fnmatch(str(file), str(path))


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
