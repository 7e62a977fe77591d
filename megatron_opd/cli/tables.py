"""Makes plain tables, and writes counts and sizes as they stand in them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

GIB, MIB = 2**30, 2**20


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
