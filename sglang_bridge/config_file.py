"""Reads a checkpoint's config.json where SGLang, or whoever started the server, judges it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def config_of(model: Path) -> dict[str, Any]:
    """Return `model`/config.json; nothing where there is none that is a JSON object."""
    try:
        found: Any = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
