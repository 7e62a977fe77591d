"""Lists what failed in a run, what was started again, and from where it was continued."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from megatron_opd.report.run_data import RunData

COUNTS = {
    "servers_restarted": "servers started again",
    "learner_restarts": "restarts of the learner",
    "updates_rolled_back": "updates rolled back with it",
    "rollouts_restarted": "rollouts sampled anew",
    "aborted_requests": "requests aborted",
    "samples_readmitted": "requests sent to another server",
    "trajectories_begun_anew": "trajectories begun anew when the run was continued",
    "requests_timed_out": "requests that ran out of time",
    "frames_refused": "frames of strangers refused",
    "updates_without_signal": "updates that taught nothing",
}
"""Counts of summary.json that are 0 in a run without trouble, in words."""


def failures_of(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield (what, details) for all that did not go as planned; nothing for a smooth run."""
    summary = run.summary or {}
    yield from _by_name("server lost", summary.get("servers_lost"))
    for key, words in COUNTS.items():
        count = summary.get(key)
        if type(count) is int and count > 0:
            yield words, f"{count:,}"
    drops = summary.get("samples_dropped")
    if not isinstance(drops, dict) and run.timeline is not None:
        drops = dict(run.timeline.drops)
    yield from _by_name("samples dropped", drops)
    yield from _by_name("prompts skipped", summary.get("prompts_skipped"))
    for key, words in (("servers_added", "server added"), ("servers_removed", "server removed")):
        for url in _items(summary.get(key)):
            yield words, str(url)
    for updates in _items(summary.get("resumed_at_updates")):
        yield "continued from a checkpoint", f"after {updates} updates"
    for change in run.changes:
        values = f"{json.dumps(change.get('before'))} to {json.dumps(change.get('after'))}"
        yield "changed when it was continued", f"{change.get('key')} from {values}"


def _by_name(words: str, found: Any) -> Iterator[tuple[str, str]]:
    if isinstance(found, Mapping):
        for name, what in cast(Mapping[str, Any], found).items():
            yield words, f"{name}: {what}"


def _items(found: Any) -> list[Any]:
    return cast(list[Any], found) if isinstance(found, list) else []
