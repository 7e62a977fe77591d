"""Saves the totals of a run as JSON, so that a resumed run's summary covers all of it.

Times are kept relative to the moment of saving; the moment of restoring takes its place, so that
the time in which no run existed counts neither as busy nor as idle.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from megatron_opd.metrics.cache_size import CacheSizes
from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.metrics.rewards import RewardStats
from megatron_opd.metrics.routing import RoutingTotals
from megatron_opd.metrics.staleness import StalenessCounts
from megatron_opd.metrics.throughput import StageTimes, Throughput
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Histogram, Max, Mean, Sum

_CONTAINERS = (RunTotals, StageTimes, StalenessCounts, CacheSizes, RewardStats, RoutingTotals)
# Belong to this process or to the configuration, not to the run's totals.
_SKIPPED = ("group_size", "_group_size", "credit", "_credit")


def dump_totals(totals: RunTotals, now_s: float) -> dict[str, Any]:
    """Return everything counted so far."""
    return _dump(totals, now_s)


def restore_totals(totals: RunTotals, saved: dict[str, Any], now_s: float) -> None:
    """Put what `dump_totals` returned into fresh totals. Engines are matched by their order."""
    _restore(totals, saved, now_s)


def _dump(value: Any, now_s: float) -> Any:
    match value:
        case Mean():
            return [value.total, value.weight]
        case Max() | Sum():
            return value.value
        case Histogram():
            return {str(key): count for key, count in value.counts.items()}
        case BusyTime():
            return [[start - now_s, stop - now_s] for start, stop in value.intervals]
        case Throughput():
            return [[tokens, done - now_s] for tokens, done in value.updates]
        case PeakMemory():
            return value.peak_bytes
        case Counter() | int():
            return value
        case dict():  # busy times by engine
            return [_dump(item, now_s) for item in cast(dict[str, BusyTime], value).values()]
        case _:
            assert isinstance(value, _CONTAINERS), type(value)
            named = {name: item for name, item in vars(value).items() if name not in _SKIPPED}
            return {name: _dump(item, now_s) for name, item in named.items()}


def _restore(target: Any, saved: Any, now_s: float) -> None:
    match target:
        case Mean():
            target.total, target.weight = saved
        case Max() | Sum():
            target.value = saved
        case Histogram():
            target.counts.update({int(key): count for key, count in saved.items()})
        case BusyTime():
            for start_s, stop_s in saved:
                target.add(start_s + now_s, stop_s + now_s)
        case Throughput():
            for tokens, done_s in saved:
                target.add(tokens, done_s + now_s)
        case PeakMemory():
            target.add(saved)
        case Counter():
            target.update(saved)
        case dict():
            engines = list(cast(dict[str, BusyTime], target).values())
            engines += [BusyTime() for _ in saved[len(engines) :]]  # there were more servers then
            for engine, busy in zip(engines, saved, strict=False):
                _restore(engine, busy, now_s)
        case _:
            for name, item in saved.items():
                if isinstance(item, int) and isinstance(getattr(target, name), int):
                    setattr(target, name, item)
                else:
                    _restore(getattr(target, name), item, now_s)
