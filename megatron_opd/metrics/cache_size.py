"""Measures how large the draw cache is, per response token, for every support.

Bytes are those of the arrays as the controller keeps them (DrawCache and Sample); what is sent to a
learner is about half of that (transport/samples.py). A cached id costs 16 = 4 (id) + 4 (weight) + 4
(sampler log-prob) + 4 (teacher log-prob); a token costs 8 (its offset) + 8 (the index of its path
token) + 4 (its response id) besides, and each sample 8 more (the last offset). Prompt tokens are
not counted. The dense layout of 64 draws that this replaces is [T, 64] of ids, sampler and teacher
log-probs, equal ids repeated: 64 * 12 = 768 bytes a token, response ids not counted.
"""

from __future__ import annotations

from megatron_opd.metrics.types import Sum
from megatron_opd.records.types import Batch


class CacheSizes:
    """Totals the cache size over the batches added."""

    def __init__(self) -> None:
        self._tokens = Sum()
        self._selected_ids = Sum()
        self._cached_ids = Sum()
        self._bytes = Sum()

    def add(self, batch: Batch) -> None:
        """Count every sample of `batch`."""
        for sample in batch.samples:
            size = sample.cache
            self._tokens.add(sample.rollout.num_response_tokens)
            self._selected_ids.add(size.selected_ids)
            self._cached_ids.add(sample.rollout.num_ids)
            self._bytes.add(size.nbytes)

    @property
    def distinct_ids_per_token(self) -> float | None:
        """Returns the ids that the support selected (weight > 0), per response token."""
        return self._per_token(self._selected_ids)

    @property
    def cached_ids_per_token(self) -> float | None:
        """Returns the ids kept per response token, including path tokens that nothing selected."""
        return self._per_token(self._cached_ids)

    @property
    def bytes_per_token(self) -> float | None:
        """Returns the bytes of the cache per response token."""
        return self._per_token(self._bytes)

    def _per_token(self, total: Sum) -> float | None:
        return total.value / self._tokens.value if self._tokens.value else None
