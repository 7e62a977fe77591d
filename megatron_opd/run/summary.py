"""Collects a run's figures, most of them from metrics/summary.py, and writes summary.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_opd.metrics.sinks import json_ready, write_json

HEADLINE = ("status", "cause", "updates", "samples_consumed", "samples_dropped", "wall_s")
"""Keys that are printed if the summary cannot be written."""


class RunSummary:
    """Collects the figures of a run from its stages, each of which adds its own once it exists."""

    def __init__(self) -> None:
        self._figures: dict[str, Callable[[], Mapping[str, Any]]] = {}

    def follow(self, stage: str, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Ask `figures` when the run ends; its keys take the place of those of earlier stages.

        Of a stage that comes again, such as an attempt, only the last one is asked, and kept.
        """
        self._figures[stage] = figures

    def write(
        self, path: Path, status: str, cause: str | None, say: Callable[..., None]
    ) -> str | None:
        """Write the summary; return None, or why it could not be written."""
        summary: dict[str, Any] = {"status": status, "cause": cause}
        for figures in self._figures.values():
            summary |= figures()
        try:
            write_json(path, summary)
        except OSError as error:
            unwritten = f"{path} cannot be written: {error.strerror}"
            headline = {key: summary[key] for key in HEADLINE}
            say(unwritten, f"summary: {json.dumps(json_ready(headline))}")
            return unwritten
        say(f"summary: {path}")
        return None
