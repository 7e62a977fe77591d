"""A page that a tool generates: written, or with --check compared with what stands on disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(page: Path, text: str, arguments: Sequence[str]) -> int:
    """The tool's exit code: 1 only where `arguments` ask for --check and the page is not `text`."""
    if "--check" in arguments:
        if page.exists() and page.read_text(encoding="utf-8") == text:
            return 0
        print(f"{page} is out of date", file=sys.stderr)
        return 1
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")
    return 0
