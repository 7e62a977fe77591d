"""Checks whether two checkpoints cut text into the same ids, judged by content, not by file.

How a tokenizer is found and loaded is tokenizers.py's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.config.sections import Guard
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.errors import UserError
from megatron_opd.inputs.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Parts = Mapping[str, Any]

# The parts that decide which ids a text becomes. The post-processor adds ids that prompts hold
# already, the decoder turns ids back into text, truncation and padding are set per call.
PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
# Parts reported by name only when they differ: a vocabulary is too long to print.
TABLES = ("vocab", "merges")
# Decides whether a token is shown when text is decoded; the ids are the same.
NO_MATTER = ("special",)


def check_tokenizer(
    path: Path, key: str, ours: PreTrainedTokenizerBase, guard: Guard
) -> PreTrainedTokenizerBase:
    """Reject a teacher to which the student's ids mean something else; return its tokenizer.

    key: the config key that named its `path`. ours: the student's. guard: what becomes of
    tokenizers that have the same ids and cut text differently. End tokens may differ, and further
    tokens stand behind the student's: scoring needs equal ids alone. Raises UserError.
    """
    theirs = load_tokenizer(path, key)
    further = further_tokens(ours.get_vocab(), theirs.get_vocab(), key)
    other = difference(tokenizer_parts(ours), without(tokenizer_parts(theirs), further))
    if guard == "off" or other is None:
        return theirs
    message = f"student.model and {key} must cut text into the same ids; {other}"
    if guard == "refuse":
        raise UserError(
            f"{message}; to compare tokens of the same bytes set scoring.alignment; to take its "
            "scores of the student's ids all the same set scoring.guard to warn or off"
        )
    logger.warning("%s", message)
    return theirs


def further_tokens(ours: Mapping[str, int], theirs: Mapping[str, int], key: str) -> frozenset[str]:
    """Return the tokens that a teacher has behind all of the student's. Raises UserError."""
    last = max(ours.values())
    differing = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))
    further = {token for token, i in differing if i > last}
    between = [entry for entry in differing if entry[1] <= last]
    if between:
        raise UserError(
            f"student.model and {key} must share one tokenizer, which may have more tokens behind "
            f"those of the student's; {len(between)} entries differ, first {between[0]!r}; to "
            "compare tokens of the same bytes set scoring.alignment: {unaligned: drop} "
            "(docs/tokenizers.md)"
        )
    return frozenset(further)


def without(parts: Parts, tokens: frozenset[str]) -> Parts:
    """Return a tokenizer's parts as they are without some tokens and the merges that make them."""
    if not tokens:
        return parts
    left = dict(parts)
    left["added_tokens"] = [
        t for t in parts.get("added_tokens") or [] if t["content"] not in tokens
    ]
    model = parts.get("model")
    if isinstance(model, dict):
        vocab, merges = model.get("vocab"), model.get("merges")
        left["model"] = model = dict(model)
        if isinstance(vocab, dict):
            model["vocab"] = {token: i for token, i in vocab.items() if token not in tokens}
        elif isinstance(vocab, list):  # of a Unigram model: a token and its score
            model["vocab"] = [entry for entry in vocab if entry[0] not in tokens]
        if isinstance(merges, list):
            model["merges"] = [pair for pair in merges if _merged(pair) not in tokens]
    return left


def _merged(pair: str | Sequence[str]) -> str:
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)


def end_notes(
    ends: Mapping[Role, EndTokens], tokenizer: PreTrainedTokenizerBase, guard: Guard
) -> list[str]:
    """Return a line for each teacher that ends elsewhere than the run, with what to set."""

    def named(ids: Sequence[int]) -> str:
        words = tokenizer.convert_ids_to_tokens(list(ids))
        return ", ".join(f"{i} {word!r}" for i, word in zip(ids, words, strict=True))

    ours, lines = ends[STUDENT], list[str]()
    for role, theirs in ends.items():
        if theirs.ids == ours.ids:
            continue
        more = [i for i in theirs.ids if i not in ours.ids]
        advice = f"; to end at the teacher's too set rollout.stop_token_ids to {more}"
        seen = "its guard samples and scores with the run's" if guard != "off" else "no guard looks"
        lines.append(
            f"student.model and {role}.model end responses differently: the run ends at "
            f"{named(ours.ids)}, {role}.model at {named(theirs.ids)}; scoring needs equal ids "
            f"alone, {seen}{advice if more else ''}"
        )
    return lines


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> Parts:
    """Return tokenizer.json as the library reads it, so that spellings of one content are equal.

    A tokenizer that has none is its vocabulary alone.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"model": {"vocab": tokenizer.get_vocab()}}
    return json.loads(backend.to_str())


def difference(ours: Parts, theirs: Parts) -> str | None:
    """Return the first part in which two tokenizers differ, and where; None: they are the same."""
    for part in PARTS:
        a, b = ours.get(part), theirs.get(part)
        if part == "model" and isinstance(a, dict) and isinstance(b, dict):
            found = _of_models(a, b)
        elif part == "added_tokens":
            found = _first_of("added tokens", _tokens(a), _tokens(b))
        else:
            found = None if a == b else f"they differ in {part}: {_short(a)} and {_short(b)}"
        if found is not None:
            return found
    return None


def _of_models(a: Parts, b: Parts) -> str | None:
    for table in TABLES:
        if a.get(table) != b.get(table):
            return _first_of(table, _rows(a.get(table)), _rows(b.get(table)))
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            return f"they differ in model.{key}: {_short(a.get(key))} and {_short(b.get(key))}"
    return None


def _rows(table: Any) -> Sequence[Any]:
    """Return a vocabulary by rising id, and merges and scores in their order."""
    if isinstance(table, dict):
        return sorted(table.items(), key=lambda item: item[1])
    return table or []


def _tokens(tokens: Any) -> Sequence[Any]:
    return [{k: v for k, v in token.items() if k not in NO_MATTER} for token in tokens or []]


def _first_of(what: str, a: Sequence[Any], b: Sequence[Any]) -> str | None:
    differing = [i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y]
    if not differing:
        return None
    first = differing[0]
    x, y = (_short(rows[first]) if first < len(rows) else "none" for rows in (a, b))
    return f"{len(differing)} of their {what} differ, the first is number {first}: {x} and {y}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 100 else f"{text[:100]}..."
