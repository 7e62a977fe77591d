"""Says which bytes every token of a tokenizer spells. Pure functions of a tokenizer.json's tree.

Invariant: joined over the tokens of a text, these bytes are the UTF-8 of that text, unless the
tokenizer changes what it reads; who joins them compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_opd.records.types import IntArray

BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a blank in pieces of SentencePiece."""
FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A byte that SentencePiece writes where no piece holds a character."""
KINDS = ("BPE", "Unigram")
NO_TWIN = -1


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Holds what the tokens of a tokenizer spell.

    of_V: by id; None: nothing (a special token, or an id without one). end: the id that ends a
    response as this model writes it; None: none is known. written_V: bool [V], whether the
    tokenizer itself writes the id for its bytes where another id spells the same.
    """

    of_V: tuple[bytes | None, ...]
    end: int | None
    written_V: tuple[bool, ...]

    def by_bytes(self) -> dict[bytes, int]:
        """Return the id that is written for each spelling: of several the lowest written one."""
        found: dict[bytes, int] = {}
        for only_written in (True, False):
            for i, spelt in enumerate(self.of_V):
                if spelt is not None and self.written_V[i] == only_written:
                    found.setdefault(spelt, i)
        return found


def read_token_bytes(tree: Mapping[str, Any], end: int | None) -> TokenBytes:
    """Return the bytes of the tokens of a tokenizer.json.

    ValueError: its model is of a kind whose tokens spell no bytes of their own, such as WordPiece.
    """
    model: Mapping[str, Any] = tree["model"]
    kind = model.get("type", "BPE")
    if kind not in KINDS:
        raise ValueError(f"its tokenizer must be of type {' or '.join(KINDS)}, got {kind}")
    vocab = model["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((p[0], i) for i, p in enumerate(vocab))
    added: Sequence[Mapping[str, Any]] = tree.get("added_tokens") or []
    steps = list(_steps(tree))
    spell = _byte_level if any(s["type"] == "ByteLevel" for s in steps) else _plain
    blanks, falls_back = any(_writes_blanks(s) for s in steps), bool(model.get("byte_fallback"))
    found: dict[int, tuple[bytes | None, bool]] = {}
    for piece, i in pairs:
        single = FALLBACK.fullmatch(piece) if falls_back else None
        if single is not None:
            found[i] = bytes([int(single[1], 16)]), False
        else:
            found[i] = spell(piece.replace(BLANK, " ") if blanks else piece), True
    unknown = model.get("unk_token")
    for i in [i for p, i in pairs if p == unknown] if unknown is not None else []:
        found[i] = None, True
    for token in added:
        spelt = None if token.get("special") else str(token["content"]).encode()
        found[int(token["id"])] = spelt, True
    rows = [found.get(i, (None, True)) for i in range(max(found, default=-1) + 1)]
    return TokenBytes(tuple(b or None for b, _ in rows), end, tuple(written for _, written in rows))


def mid_text(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that cuts a text as a continuation of another one.

    Nothing is put in front of it or around it: neither a blank nor a special token.
    """
    plain: dict[str, Any] = json.loads(json.dumps(tree))
    plain |= {"post_processor": None, "truncation": None, "padding": None}
    for name in ("normalizer", "pre_tokenizer"):
        plain[name] = _without_prefix(plain.get(name))
    return plain


def twins(ours: TokenBytes, theirs: TokenBytes) -> IntArray:
    """Return int32 [V]: for each id of ours the id of theirs that spells the same bytes, else -1.

    The ends of responses are each other's; other special tokens have none. No id of theirs is the
    twin of two: of ours that spell the same, only the one that our tokenizer writes has one.
    """
    twin_V = np.full(len(ours.of_V), NO_TWIN, np.int32)
    there = theirs.by_bytes()
    for spelt, i in ours.by_bytes().items():
        twin_V[i] = there.get(spelt, NO_TWIN)
    if ours.end is not None and theirs.end is not None:
        twin_V[ours.end] = theirs.end
    return twin_V


def _steps(tree: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """List the steps of normalizer, pre-tokenizer and decoder, those inside sequences too."""
    waiting = [tree.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        step = waiting.pop()
        if step is None:
            continue
        yield step
        for held in ("normalizers", "pretokenizers", "decoders"):
            waiting.extend(step.get(held) or [])


def _writes_blanks(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return True
    pattern = step.get("pattern")
    texts = (pattern.get("String") if isinstance(pattern, dict) else None, step.get("content"))
    return step["type"] == "Replace" and texts in ((" ", BLANK), (BLANK, " "))


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    if step is None or step["type"] == "Prepend":
        return None
    for held in ("normalizers", "pretokenizers"):
        if held in step:
            parts = [_without_prefix(part) for part in step[held]]
            step[held] = [part for part in parts if part is not None]
    if step["type"] == "Metaspace":
        step["prepend_scheme"] = "never"
    if step["type"] == "ByteLevel":
        step["add_prefix_space"] = False
    return step


def _plain(piece: str) -> bytes:
    return piece.encode()


def _byte_level(piece: str) -> bytes | None:
    """Return what a piece of byte-level BPE spells; None: a character of it stands for no byte."""
    try:
        return bytes(BYTE_OF[character] for character in piece)
    except KeyError:
        return None


def _byte_map() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE stands for (GPT-2's table)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    shown = [*map(chr, printed), *(chr(256 + n) for n in range(len(others)))]
    return dict(zip(shown, [*printed, *others], strict=True))


BYTE_OF = _byte_map()
