"""What strangers may try on every wire of a run, and what comes of it.

    python -m checks security [--only WORDS ...]

A run of the example with real servers, and `opd watch` beside it, are attacked one way after
another. Each row says what the stranger saw, whether the refusal was counted in the log, and that
the run made an update afterwards; `failed` names rows that are not so. Refused: an error, or a
connection that is closed without an answer; held: one that stays open. --only: attacks with one of
these words in their name. At the end all files of the run, its
output and its processes' arguments are searched for its keys.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return one row for each attack, and where the secrets were found."""
    from checks.security.table import security_table

    parser = argparse.ArgumentParser(prog="python -m checks security")
    parser.add_argument("--only", nargs="+", default=[""])
    only = parser.parse_args(list(options)).only
    with tempfile.TemporaryDirectory(prefix="opd-security-") as scratch:
        return security_table(Path(scratch), only)
