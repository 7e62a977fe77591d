"""Adds up what each student server did, from the column `servers` of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from megatron_opd.report.series import number


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """Holds the rollouts and tokens that a server finished.

    version: of its weights after the last weight sync; None: it took no part in that, so it was
    lost or removed.
    """

    url: str
    rollouts: int
    tokens: int
    version: int | None


def server_totals(rows: Iterable[Mapping[str, Any]]) -> tuple[ServerTotals, ...]:
    """Add up all rows, by url in order of first mention."""
    found: dict[str, ServerTotals] = {}
    for row in rows:
        servers = row.get("servers")
        if not isinstance(servers, dict):
            continue
        for url, figures in cast(dict[str, Any], servers).items():
            if not isinstance(figures, dict):
                continue
            said = cast(dict[str, Any], figures)
            before = found.get(url, ServerTotals(url, 0, 0, None))
            version = said.get("version")
            found[url] = ServerTotals(
                url,
                before.rollouts + _count(said.get("rollouts")),
                before.tokens + _count(said.get("tokens")),
                version if type(version) is int else None,
            )
    return tuple(found.values())


def _count(value: Any) -> int:
    found = number(value)
    return int(found) if found > 0 else 0
