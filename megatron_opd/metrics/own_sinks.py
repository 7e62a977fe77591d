"""Makes a user's own sinks, which `metrics.sinks` names by import path, and keeps a run from them.

A user's sink never stops a run: the first exception is told in one line, and it gets no more rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_opd.config.import_path import load_object
from megatron_opd.config.wording import line
from megatron_opd.metrics.sinks import Sink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Tells a sink what it is made for.

    directory: run.dir, which exists. updates: how many the run has made already, above 0 where it
    continues from a checkpoint; rows of later ones may have been written before. config: the
    resolved configuration as plain values.
    """

    directory: Path
    updates: int
    config: Mapping[str, Any]


MakeSink = Callable[[RunFacts], Sink]


def load_maker(path: str) -> MakeSink:
    """Import what makes a sink: MODULE:NAME of a class or function that takes RunFacts.

    ValueError: it cannot be imported, or called.
    """
    found: Any = load_object(path)
    if not callable(found):
        raise ValueError(
            f"metrics.sinks: {path} must be a class or function that takes RunFacts and makes a "
            f"sink, got {type(found).__name__}"
        )
    return cast(MakeSink, found)


class OwnSink:
    """Passes rows to a user's sink until it raises.

    Args:
        path: its import path, for the warning.
        facts: what it is made for.
    """

    def __init__(self, path: str, facts: RunFacts) -> None:
        self._path, self._sink = path, None
        self._sink = self._try(lambda: load_maker(path)(facts))

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Pass the row on; it is a copy, so nothing that the sink does to it is seen elsewhere."""
        if (sink := self._sink) is not None:
            self._try(lambda: sink.write(update, dict(row)))

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Pass the row on."""
        if (sink := self._sink) is not None:
            self._try(lambda: sink.evaluated(dict(row)))

    def close(self) -> None:
        """Close it; once."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._try(sink.close)

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  a bug in a log must not cost a run
            self._sink = None
            logger.warning(
                "metrics.sinks: %s raised %s and gets no more rows; they are in metrics.jsonl",
                self._path,
                f"{type(error).__name__}: {line(error)}",
            )
            return None
