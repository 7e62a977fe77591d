"""Finds where two tokenisations of the same bytes have boundaries in common. Pure arrays.

Axes: T tokens of the student, R tokens of the teacher that spell the same bytes, or the beginning
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_opd.records.types import OffsetArray

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """Says how two tokenisations lie against each other.

    row_T: int64 [T], the teacher's token that begins where the student's does; NOWHERE: none does.
    chunk_T, chunk_R: int64 [T], [R], the number of the smallest span that both tokenisations cover
    with whole tokens; NOWHERE: none. Chunks are numbered from 0 in the order of the text.
    """

    row_T: OffsetArray
    chunk_T: OffsetArray
    chunk_R: OffsetArray

    @property
    def same_T(self) -> OffsetArray:
        """Returns int64 [T]: the teacher's token that spans what the student's does; else NOWHERE.

        Where one begins at the same byte and another ends there, the teacher's is longer or shorter
        than what was written, and says little of it.
        """
        tokens_C, theirs_C = (
            np.bincount(chunk_n[chunk_n != NOWHERE], minlength=self.num_chunks)
            for chunk_n in (self.chunk_T, self.chunk_R)
        )
        alone_C = np.append((tokens_C == 1) & (theirs_C == 1), False)  # the last is NOWHERE's
        return np.where(alone_C[self.chunk_T], self.row_T, NOWHERE)

    @property
    def num_chunks(self) -> int:
        """Returns the number of spans that both cover."""
        return int(self.chunk_R.max(initial=NOWHERE)) + 1


def spans_of(length_T: Sequence[int], length_R: Sequence[int]) -> TokenSpans:
    """Return how tokens of these lengths in bytes, all > 0, lie against each other.

    The teacher's may spell less than the student's; what lies beyond is in no span.
    """
    bound_T1 = np.concatenate([[0], np.cumsum(length_T, dtype=np.int64)])
    bound_R1 = np.concatenate([[0], np.cumsum(length_R, dtype=np.int64)])
    common = np.intersect1d(bound_T1, bound_R1)
    place_T = np.searchsorted(bound_R1, bound_T1[:-1])
    begins_T = np.isin(bound_T1[:-1], bound_R1[:-1])
    row_T = np.where(begins_T, place_T, NOWHERE)
    chunk_T, chunk_R = (
        np.where(bound_1[1:] <= common[-1], np.searchsorted(common, bound_1[1:]) - 1, NOWHERE)
        for bound_1 in (bound_T1, bound_R1)
    )
    return TokenSpans(row_T, chunk_T, chunk_R)
