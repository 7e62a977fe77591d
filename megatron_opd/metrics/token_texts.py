"""Splits a response into the texts of its tokens, so that together they are the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands in decoded text for bytes that are no whole character."""
MOST_BYTES = 4
"""Bytes of a character in UTF-8, so the most tokens that one can be spread over."""

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, special tokens included."""


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return one text per token. A token that ends inside a character has the empty text.

    The token that completes the character has it whole. Each token is decoded together with the few
    before it, since a tokenizer may decode the first of a text otherwise (without its space).
    Linear in the number of tokens, whatever they are.
    """
    texts: list[str] = []
    begin, done, known = 0, 0, ""  # known: decode(ids[begin:done]), whose texts are made
    for stop in range(1, len(ids) + 1):
        text = decode(ids[begin:stop])
        waits = text.endswith(REPLACEMENT) and stop - done < MOST_BYTES and stop < len(ids)
        if waits:
            texts.append("")
            continue
        # a token that was taken for the end of a character may turn out to begin one
        same = takewhile(lambda pair: pair[0] == pair[1], zip(known, text, strict=False))
        texts.append(text[sum(1 for _ in same) :])
        begin, done = done, stop
        known = decode(ids[begin:done])
    return texts
