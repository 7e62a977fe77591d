"""Prints lines and plain tables, and writes counts and sizes as they stand in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_opd.errors import UserError

GIB, MIB = 2**30, 2**20


def print_lines(console: Console, *lines: str) -> None:
    """Print lines for the user as they are."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def new_table(title: str, columns: Sequence[str], text_columns: int = 1) -> Table:
    """Return an empty table whose first columns are text and whose others are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < text_columns else "right")
    return table


def count_text(elements: int) -> str:
    """Return a number of parameters, in millions or billions."""
    if elements >= 1e9:
        return f"{elements / 1e9:.2f} B"
    return f"{elements / 1e6:.2f} M"


def byte_text(size: int) -> str:
    """Return a size in MiB, or in GiB from one on."""
    unit, name = (GIB, "GiB") if size >= GIB else (MIB, "MiB")
    return f"{size / unit:.1f} {name}"


IMAGES = (".png", ".svg", ".pdf")


def check_writable(option: str, path: Path) -> None:
    """Check that a file can be written. Raises UserError."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option} must be a file in a directory that can be written, got {path}")


def check_plot(path: Path) -> None:
    """Check that --plot names an image that can be drawn. Raises UserError."""
    if path.suffix not in IMAGES:
        raise UserError(f"--plot must end in {', '.join(IMAGES)}, got {path}")
    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'megatron-opd[plots]'")
