"""Counts what becomes of each site, its samples and its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_opd.metrics.types import Max, Mean
from megatron_opd.wire.link.counts import LinkCounts


@dataclass(slots=True)
class SiteFigures:
    """Counts for one site, from the start of the learner's process on.

    samples: that counted. duplicates: that were there already, or are not wanted any more. void:
    answers to a run that has gone back to a checkpoint since. faults: malformed or forged samples.
    refused: messages that were not taken, by why. behind_versions: of a sample, newest version of
    the learner less that of its oldest token, when it came. delay_s: from the end of sampling until
    the learner had it.
    """

    samples: int = 0
    tokens: int = 0
    gone: Counter[str] = field(default_factory=Counter[str])
    duplicates: int = 0
    void: int = 0
    faults: int = 0
    too_late: int = 0
    starts: int = 0
    lost: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    version: int | None = None
    behind_versions: Mean = field(default_factory=Mean)
    behind_most: Max = field(default_factory=Max)
    delay_s: Mean = field(default_factory=Mean)
    delay_most_s: Max = field(default_factory=Max)

    def add_sample(self, tokens: int, behind: int, delay_s: float) -> None:
        """Count a sample."""
        self.samples += 1
        self.tokens += tokens
        self.behind_versions.add(behind)
        self.behind_most.add(behind)
        self.delay_s.add(delay_s)
        self.delay_most_s.add(delay_s)

    def as_json(self, state: str, link: LinkCounts, weight_bytes: int) -> dict[str, Any]:
        """Return what summary.json says of the site."""
        return {
            "state": state,
            "samples": self.samples,
            "response_tokens": self.tokens,
            "samples_gone": dict(sorted(self.gone.items())),
            "duplicates": self.duplicates,
            "void": self.void,
            "samples_refused": self.faults,
            "too_late": self.too_late,
            "starts": self.starts,
            "lost": self.lost,
            "messages_refused": dict(sorted(self.refused.items())),
            "version": self.version,
            "behind_versions_mean": self.behind_versions.value,
            "behind_versions_max": self.behind_most.value,
            "delay_s_mean": self.delay_s.value,
            "delay_s_max": self.delay_most_s.value,
            "connections": link.connections,
            "bytes_sent": link.bytes_sent,
            "wire_bytes_sent": link.wire_bytes_sent,
            "bytes_received": link.bytes_received,
            "weight_bytes": weight_bytes,
            "chunks_refused": dict(sorted(link.refused.items())),
        }


@dataclass(frozen=True, slots=True)
class SitesNow:
    """Says how the sites do at one moment."""

    connected: int
    quarantined: int


def columns(figures: Mapping[str, SiteFigures], now: SitesNow) -> dict[str, Any]:
    """Return the columns of a row of metrics.jsonl; all counts are totals so far."""
    behind, delay = Mean(), Mean()
    for each in figures.values():
        behind.total += each.behind_versions.total
        behind.weight += each.behind_versions.weight
        delay.total += each.delay_s.total
        delay.weight += each.delay_s.weight
    return {
        "sites_connected": now.connected,
        "sites_quarantined": now.quarantined,
        "site_samples": sum(each.samples for each in figures.values()),
        "site_duplicates": sum(each.duplicates for each in figures.values()),
        "site_samples_refused": sum(each.faults for each in figures.values()),
        "site_lost": sum(each.lost for each in figures.values()),
        "site_behind_versions_mean": behind.value,
        "site_behind_versions_max": _most(each.behind_most for each in figures.values()),
        "site_delay_s_mean": delay.value,
        "site_delay_s_max": _most(each.delay_most_s for each in figures.values()),
    }


def _most(found: Iterable[Max]) -> float | None:
    known = [each.value for each in found if each.value is not None]
    return max(known, default=None)
