"""Puts the hint of one row in front of the problem of another, for the meter of hints.

Invariant: what comes of two rows is what would have been written of the second one's hint and the
first one's problem, or nothing. A teacher's prompt holds the student's prompt word for word; all
that stands around that is the hint, and the template's, which are all rows' alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_opd.records.types import IntArray, Prompt


@dataclass(frozen=True, slots=True)
class HintSwap:
    """Makes prompts with wrong hints.

    decode: turns token ids into text, special tokens included. encode: the opposite, without
    special tokens of its own.
    """

    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], Sequence[int]]

    def wrong(self, prompt: Prompt, other: Prompt) -> IntArray | None:
        """Return the ids of the problem of `prompt` with the hint of `other`, int32 [Q].

        None: one of them has no hint, or it cannot be told from the problem (`readable`).
        """
        ours, theirs = self.readable(prompt), self.readable(other)
        if ours is None or theirs is None:
            return None
        text = theirs.replace(other.text.strip(), prompt.text.strip())
        return np.array(self.encode(text), np.int32)

    def readable(self, prompt: Prompt) -> str | None:
        """Return what the teacher reads of a row, as text; None where the problem is not in it.

        Nor is it told where the text does not become the same ids again.
        """
        if prompt.teacher_ids_Q is None:
            return None
        text, problem = self.decode(prompt.teacher_ids_Q.tolist()), prompt.text.strip()
        if not problem or problem not in text:
            return None
        same = np.array_equal(np.asarray(self.encode(text)), prompt.teacher_ids_Q)
        return text if same else None
