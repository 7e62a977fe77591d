"""Writes summary.json at the end of a run, or tells the user what it would have held."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_opd.metrics.sinks import json_ready, write_json

HEADLINE = ("status", "cause", "updates", "samples_consumed", "samples_dropped", "wall_s")
"""Keys that are printed if the summary cannot be written."""


def written_summary(path: Path, summary: Mapping[str, Any], say: Callable[..., None]) -> str | None:
    """Write the summary; return None, or why it could not be written."""
    try:
        write_json(path, summary)
    except OSError as error:
        unwritten = f"{path} cannot be written: {error.strerror}"
        headline = {key: summary[key] for key in HEADLINE}
        say(unwritten, f"summary: {json.dumps(json_ready(headline))}")
        return unwritten
    say(f"summary: {path}")
    return None
