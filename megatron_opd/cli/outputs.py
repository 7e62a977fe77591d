"""Checks the files that a command is asked to write, before it does the work for them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from megatron_opd.cli.errors import UserError

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
