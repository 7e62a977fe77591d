"""What strangers may try on every wire of a run, and what comes of it.

    python -m benchmarks security

A run of the example with real servers, and `opd watch` beside it, are attacked one way after
another. Each row says what the stranger saw, whether the refusal was counted in the log, and that
the run made an update afterwards; `failed` names rows that are not so. A slow-loris on HTTP is
held, not refused: what counts is that the door still answers. At the end all files of the run, its
output and its processes' arguments are searched for its keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return one row for each attack, and where the secrets were found."""
    from benchmarks.security.table import security_table

    assert not options
    with tempfile.TemporaryDirectory(prefix="opd-security-") as scratch:
        return security_table(Path(scratch))
