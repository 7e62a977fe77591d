"""Leaves out packages that a program's libraries import only because they are installed."""

from __future__ import annotations

import sys


def keep_out(*packages: str) -> None:
    """Makes every later import of these packages fail in this process as if not installed."""
    for package in packages:
        sys.modules.setdefault(package, None)  # pyright: ignore[reportArgumentType]
