"""What sources of pages may call besides records: tables, and figures of several rows together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools import findings_table

Records = Callable[[str], Any]


def table(records: Records, name: str) -> str:
    """A table of tools/findings_table.py."""
    return "\n".join(findings_table.TABLES[name](records("findings")["studies"]))


FUNCTIONS: dict[str, Callable[..., Any]] = {"table": table}
"""By name; each is given the records first."""
