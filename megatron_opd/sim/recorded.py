"""Reads the lengths of a recorded run from its time line."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_opd.sim.costs import RecordedLengths

TRACE = "trace.json"


def recorded_lengths(run_dir: Path) -> RecordedLengths:
    """Return the (prompt, response) lengths of all rollouts of a run, also one that was killed.

    ValueError, in one line: there is no time line, or it holds no rollout.
    """
    path = run_dir / TRACE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"{path}: {cause}; metrics.trace writes it") from None
    found = [pair for line in text.splitlines() if (pair := _lengths(line)) is not None]
    if not found:
        raise ValueError(f"{path} holds no rollout")
    return RecordedLengths(pairs=found)


def _lengths(line: str) -> tuple[int, int] | None:
    """Return the lengths of a line of the time line that is a whole rollout, else None."""
    try:
        event = json.loads(line.rstrip(","))
        if not event["name"].startswith("rollout "):
            return None
        lengths = event["args"]["prompt_tokens"], event["args"]["response_tokens"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # a bracket, or a line that was cut off when the run was killed
    return lengths if all(type(length) is int and length > 0 for length in lengths) else None
