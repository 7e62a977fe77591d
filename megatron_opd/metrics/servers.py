"""Counts what each student server sampled between two weight syncs."""

from __future__ import annotations

from collections import Counter

from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.types import AnyRollout


class SampledByServer:
    """Counts responses and their tokens by the server that finished them."""

    def __init__(self) -> None:
        self._rollouts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def add(self, rollout: AnyRollout) -> None:
        """Count a finished rollout."""
        self._rollouts[rollout.engine] += 1
        self._tokens[rollout.engine] += rollout.num_response_tokens

    def columns(self, report: WeightSyncReport) -> dict[str, dict[str, int | None]]:
        """Return what a row says of every server, and count from 0 again.

        version: that it holds since this weight sync; None: it took no part, so it was lost or
        removed. rollouts, tokens: that it finished since the last weight sync.
        """
        synced = set(report.servers)
        urls = sorted(synced | self._rollouts.keys())
        found: dict[str, dict[str, int | None]] = {
            url: {
                "version": report.version if url in synced else None,
                "rollouts": self._rollouts[url],
                "tokens": self._tokens[url],
            }
            for url in urls
        }
        self._rollouts.clear()
        self._tokens.clear()
        return found
