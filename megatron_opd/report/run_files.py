"""Opens a run directory for reading: every file that a run leaves, whatever state the run is in.

Nothing is written or locked, so that a reader can never slow or stop a run. Rows are read as they
are appended (AppendedRows); small files are read whole each time, and are replaced in one step by
the run, so a reader sees the old content or the new one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from megatron_opd.checkpoint.run_lock import LOCK, read_holder
from megatron_opd.config.plain_yaml import load_plain
from megatron_opd.config.unique_keys import DuplicateKey
from megatron_opd.report.appended import AppendedRows
from megatron_opd.report.state import RunState, run_state

METRICS, EVALUATIONS, ROLLOUTS = "metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl"
RESOLVED, SUMMARY, TRACE, LOGS = "config.resolved.yaml", "summary.json", "trace.json", "logs"
CHANGES, EARLIER = "changes.json", "earlier"
LOG_END_BYTES = 16_384
"""Bytes of a log's end that are read: a traceback and what led to it."""


class NotARun(ValueError):
    """Reports in one line why a path is no run directory that can be read."""


@dataclass(frozen=True, slots=True)
class LogFile:
    """Describes one log. end: its last lines, with bytes that are no UTF-8 replaced."""

    name: str
    num_bytes: int
    end: str


class RunFiles:
    """Reads one run directory.

    Args:
        path: the directory. NotARun: it does not exist, or is no run's.

    metrics, evaluations, rollouts: rows as they come; see AppendedRows.
    """

    def __init__(self, path: Path) -> None:
        _refuse_strangers(path)
        self.path = path
        self.metrics = AppendedRows(path / METRICS)
        self.evaluations = AppendedRows(path / EVALUATIONS)
        self.rollouts = AppendedRows(path / ROLLOUTS)

    def summary(self) -> dict[str, Any] | None:
        """Return summary.json; None: it is not there (yet), or damaged."""
        return _json_object(self.path / SUMMARY)

    def state(self) -> RunState:
        """Return whether the run is running, finished, failed, ..."""
        return run_state(self.summary(), read_holder(self.path / LOCK))

    def config(self) -> dict[str, Any] | None:
        """Return config.resolved.yaml as plain values; None: it is missing or damaged."""
        try:
            tree = load_plain((self.path / RESOLVED).read_text(encoding="utf-8"), RESOLVED)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, DuplicateKey, RecursionError):
            return None
        return cast(dict[str, Any], tree) if isinstance(tree, dict) else None

    def changes(self) -> tuple[dict[str, Any], ...]:
        """Return the changes of keys that were accepted when the run was resumed."""
        found = _json(self.path / CHANGES)
        items = cast(list[Any], found) if isinstance(found, list) else []
        return tuple(cast(dict[str, Any], item) for item in items if isinstance(item, dict))

    def traces(self) -> tuple[Path, ...]:
        """Return the time lines of the run, those of earlier attempts first."""
        earlier = [attempt / TRACE for attempt in self._attempts()]
        return tuple(path for path in (*earlier, self.path / TRACE) if path.is_file())

    def logs(self) -> tuple[LogFile, ...]:
        """Return the logs of the present attempt, by name."""
        try:
            paths = sorted(path for path in (self.path / LOGS).iterdir() if path.is_file())
        except OSError:
            return ()
        return tuple(log for path in paths if (log := _log(path)) is not None)

    def written_s(self) -> float | None:
        """Return when anything was last written to the files read here (seconds since 1970)."""
        times: list[float] = []
        for name in (METRICS, EVALUATIONS, ROLLOUTS, SUMMARY, TRACE):
            with contextlib.suppress(OSError):  # not written (yet), or just replaced
                times.append((self.path / name).stat().st_mtime)
        return max(times, default=None)

    def _attempts(self) -> Sequence[Path]:
        try:
            found = [each for each in (self.path / EARLIER).iterdir() if each.name.isdecimal()]
        except OSError:
            return ()
        return sorted(found, key=lambda each: int(each.name))


def _refuse_strangers(path: Path) -> None:
    try:
        present = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        raise NotARun(f"{path}: there is no such directory") from None
    except NotADirectoryError:
        raise NotARun(f"{path} is a file; name the directory of a run") from None
    except OSError as error:
        raise NotARun(f"{path} cannot be read: {error.strerror}") from None
    if not present & {RESOLVED, METRICS, SUMMARY}:
        raise NotARun(f"{path} is not a run's directory: it holds no {RESOLVED} and no {METRICS}")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _json_object(path: Path) -> dict[str, Any] | None:
    found = _json(path)
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


def _log(path: Path) -> LogFile | None:
    """Read the end of a log; None: it has gone meanwhile, or cannot be read."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - LOG_END_BYTES))
            end = stream.read(LOG_END_BYTES)
    except OSError:
        return None
    text = end.decode("utf-8", errors="replace")
    # the first line is torn where the log is longer than what was read
    return LogFile(path.name, size, text.partition("\n")[2] if size > LOG_END_BYTES else text)
