"""Puts what a case measured into a few figures, and cases of one layout into ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Tree = dict[str, Any]
PER_CASE = ("seconds", "paused_s", "cpu_s", "learner_peak_extra_bytes", "server_peak_extra_bytes")
PER_CASE += ("sent_bytes_max", "received_bytes_max", "tokens_lost", "tokens_per_s_times_pause")
PER_CASE += ("verify_s",)


def summarised(figures: Tree, model_bytes: int) -> Tree:
    """The medians of the syncs after the first, and what the other measurements come to."""
    syncs, first = figures["syncs"], figures["first"]
    seconds = [each["seconds"] for each in syncs]
    decoding = figures["decoding"]
    return {
        "open_s": figures["open_s"],
        "first_s": first["seconds"],
        "verify_s": sum(s for name, s in first["phases_s"].items() if name.startswith("verify")),
        "seconds": statistics.median(seconds),
        "seconds_of_each": seconds,
        "gb_per_s": model_bytes / statistics.median(seconds) / 1e9,
        "paused_s": statistics.median(each["paused_s"] for each in syncs),
        "learner_held_s": statistics.median(each["learner_held_s"] for each in syncs),
        "phases_s": {
            name: statistics.median(each["phases_s"][name] for each in syncs)
            for name in syncs[0]["phases_s"]
        },
        "cpu_s": statistics.median(
            sum(each["learner"]["cpu_s"]) + sum(each["server"]["cpu_s"]) for each in syncs
        ),
        "learner_cpu_s": _by_rank(syncs, "learner", "cpu_s"),
        "server_cpu_s": _by_rank(syncs, "server", "cpu_s"),
        "sent_bytes": _by_rank(syncs, "learner", "sent_bytes"),
        "sent_bytes_max": _largest(_by_rank(syncs, "learner", "sent_bytes")),
        "received_bytes": _by_rank(syncs, "server", "received_bytes"),
        "received_bytes_max": _largest(_by_rank(syncs, "server", "received_bytes")),
        "shard_bytes": figures["shard_bytes"],
        "received_over_shard": _over(
            _by_rank(syncs, "server", "received_bytes"), figures["shard_bytes"]
        ),
        # of the first sync it holds shadow buffers, which stay, and what digests need
        "first_peak_extra_bytes": {side: _peak([first], side) for side in ("learner", "server")},
        "learner_peak_extra_bytes": _peak(syncs, "learner"),
        "server_peak_extra_bytes": _peak(syncs, "server"),
        "tokens_lost": decoding["tokens_lost"],
        "tokens_lost_of_each": decoding["tokens_lost_of_each"],
        "tokens_per_s_times_pause": decoding["tokens_per_s_times_pause"],
        "tokens_per_s": decoding["tokens_per_s"],
        "window_s": decoding["window_s"],
        "seconds_while_decoding": statistics.median(s["seconds"] for s in decoding["syncs"]),
        "paused_s_while_decoding": statistics.median(s["paused_s"] for s in decoding["syncs"]),
    }


def ratios(rows: Mapping[str, Tree]) -> Tree:
    """{way: {figure: how many times that of `shards`}} of one layout, for the ways but `shards`."""
    shards = rows.get("shards")
    if shards is None:
        return {}
    return {
        way: {key: _ratio(row[key], shards[key]) for key in PER_CASE}
        for way, row in rows.items()
        if way != "shards"
    }


def _ratio(other: float | None, shards: float | None) -> float | None:
    return other / shards if other is not None and shards is not None and shards > 0 else None


def _by_rank(syncs: Sequence[Tree], side: str, key: str) -> list[float] | None:
    """The median of the syncs, by rank; null where it was not measured."""
    found = [each[side][key] for each in syncs]
    if any(each is None for each in found):
        return None
    return [statistics.median(ranks) for ranks in zip(*found, strict=True)]


def _largest(by_rank: Sequence[float] | None) -> float | None:
    return None if by_rank is None else max(by_rank)


def _over(received: Sequence[float] | None, shard: Sequence[int]) -> list[float] | None:
    """Both sorted: ranks are known here by process, not by number."""
    if received is None:
        return None
    return [a / b for a, b in zip(sorted(received), sorted(shard), strict=True)]


def _peak(syncs: Sequence[Tree], side: str) -> int:
    return max(max(each[side]["peak_extra_bytes"]) for each in syncs)
