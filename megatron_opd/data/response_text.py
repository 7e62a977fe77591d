"""Turns a sampled response into the text of its answer: without what ended it or special tokens.

Invariant: no special token is in the text, however the response ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_opd.data.end_tokens import Ending

Decoder = Callable[[Sequence[int]], str]
"""Turns token ids into text as they stand, special tokens included."""
Encode = Callable[[str], list[int]]
"""Cuts text into the student's ids, without any that its tokenizer would add."""


@dataclass(frozen=True, slots=True)
class ResponseText:
    """Reads responses. special: the texts of special tokens by their ids."""

    decode: Decoder
    special: Mapping[int, str] = field(default_factory=dict[int, str])

    def answer(self, ids: Sequence[int], ending: Ending) -> str:
        """Return the text before what ended the response.

        A stop string is looked for as the server does, in text that shows special tokens: they may
        be part of it. Those before it are left out afterwards.
        """
        kept = ids[: ending.index(ids)]
        special = [token for token in kept if token in self.special]
        text = self.decode(kept)
        found = [at for stop in ending.strings if (at := text.find(stop)) >= 0]
        if not found:
            return self.decode([i for i in kept if i not in self.special]) if special else text
        text = text[: min(found)]
        for token in dict.fromkeys(special):
            text = text.replace(self.special[token], "")
        return text
