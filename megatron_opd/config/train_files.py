"""Defines what data.train may be: one file, or several with weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field

from megatron_opd.config.section import FilePath, Section
from megatron_opd.config.wording import line, shown

MAX_FILES = 1000
MAX_WEIGHT = 1e6


class TrainFile(Section):
    """Names one file of prompts, and how often it is drawn from."""

    path: FilePath
    """File, folder or pattern of files, directory of the library `datasets`, or MODULE:FUNCTION."""
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)] | None = None
    """Share of the prompts drawn from it, relative to the other files' weights."""


def _as_files(value: Any) -> Any:
    """Take a path for a list of one, and a path in a list for a mapping."""
    if isinstance(value, str | Path):
        value = (value,)
    if not isinstance(value, list | tuple):
        return value
    found = cast(Sequence[Any], value)
    if not 0 < len(found) <= MAX_FILES:
        raise ValueError(f"must name 1..{MAX_FILES} files, got {len(found)}")
    return tuple({"path": each} if isinstance(each, str | Path) else each for each in found)


def _are_compatible(files: tuple[TrainFile, ...]) -> tuple[TrainFile, ...]:
    unweighted = [file for file in files if file.weight is None]
    if 0 < len(unweighted) < len(files):
        raise ValueError(
            f"must have a weight for every file or for none, got none for {unweighted[0].path}"
        )
    places = [os.path.abspath(file.path) for file in files]
    for file, place in zip(files, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(
                f"must name each file once, got {shown(line(file.path))} twice; "
                "to draw from it more often, give it a larger weight"
            )
    return files


TrainFiles = Annotated[
    tuple[TrainFile, ...], BeforeValidator(_as_files), AfterValidator(_are_compatible)
]
