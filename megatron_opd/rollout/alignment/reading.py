"""Turns a response of the student's into what a teacher of another tokenizer reads instead.

The teacher reads its own tokens of the student's text. It reads up to the first thing that it
cannot: a special token of the student's other than the end, bytes that are no UTF-8. What follows
has no score, as the teacher would have read another text before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_opd.records.types import IntArray
from megatron_opd.rollout.alignment.spans import NOWHERE, TokenSpans, spans_of
from megatron_opd.rollout.alignment.token_bytes import TokenBytes, twins

Encode = Callable[[str], Sequence[int]]
"""Returns the ids of a text in the middle of another one: nothing is put around it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Holds what a teacher reads of a response.

    ids_R: int32 [R], in the response's place. spans: how its tokens lie against the student's T;
    those that are not read lie nowhere.
    """

    ids_R: IntArray
    spans: TokenSpans


class Reader:
    """Reads responses for one pair of tokenizers.

    ours, theirs: what the tokens of each spell. twin_V: int32 [V], of each id of the student's the
    teacher's that spells the same, else -1.
    """

    def __init__(self, ours: TokenBytes, theirs: TokenBytes, encode: Encode) -> None:
        self.ours, self.theirs, self._encode = ours, theirs, encode
        self.twin_V = twins(ours, theirs)

    def read(self, ids_T: Sequence[int] | IntArray) -> Reading:
        """Return what the teacher reads of a response; nothing where its tokenizer changes it."""
        spelt = self._spelt(ids_T)
        whole = b"".join(spelt)
        text = readable(whole)
        found = list(self._encode(text))
        theirs = [self._bytes(i) for i in found]
        if b"".join(theirs) != text.encode():
            found, theirs = [], []  # a normaliser: the teacher would read another text
        spans = spans_of([len(each) for each in spelt], [len(each) for each in theirs])
        ended = len(spelt) < len(ids_T) and ids_T[len(spelt)] == self.ours.end
        end = self.theirs.end
        read = b"".join(theirs) == whole
        row_T, chunk_T, chunk_R = spans.row_T, spans.chunk_T, spans.chunk_R
        if ended and end is not None and read:
            row_T, chunk_T = np.append(row_T, len(found)), np.append(chunk_T, spans.num_chunks)
            chunk_R = np.append(chunk_R, spans.num_chunks)
            found.append(end)
        unread = [(0, len(ids_T) - len(row_T))]
        return Reading(
            np.array(found, np.int32),
            TokenSpans(
                np.pad(row_T, unread, constant_values=NOWHERE),
                np.pad(chunk_T, unread, constant_values=NOWHERE),
                chunk_R,
            ),
        )

    def _spelt(self, ids_T: Sequence[int] | IntArray) -> list[bytes]:
        """Return the bytes of the tokens before the first that spells none."""
        found: list[bytes] = []
        for i in ids_T:
            spelt = self.ours.of_V[i] if i < len(self.ours.of_V) and i != self.ours.end else None
            if spelt is None:
                break
            found.append(spelt)
        return found

    def _bytes(self, i: int) -> bytes:
        return self.theirs.of_V[i] or b""


def readable(spelt: bytes) -> str:
    """Return the longest beginning that is UTF-8: a character may be cut, or never come."""
    try:
        return spelt.decode()
    except UnicodeDecodeError as error:
        return spelt[: error.start].decode()
