"""A JSONL file of prompts -> prompts, and every other row counted with its cause."""

from __future__ import annotations

import json
import math
from functools import cache
from random import Random
from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, one_of
from checks.fuzz.places import written
from megatron_opd.data.files import NOT_LINES
from megatron_opd.data.outcomes import TOO_LONG
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import PromptSet, load_prompts
from megatron_opd.data.records import Columns
from megatron_opd.data.tokenizer import build_tokenizer

ROWS = [
    {"prompt": "12+34=\n", "answer": "46", "response": "#46"},
    {"prompt": "1+1=", "answer": 2, "extra": {"a": [1, 2]}},
    {"prompt": "a longer prompt " * 3, "answer": 3.5, "who": "math"},
    {"prompt": "é?", "answer": "x", "who": "code"},
]
MOST_TOKENS = 40
RULES = PromptRules(
    Columns(("prompt",), answers=("answer",), needed=True),
    max_tokens=MOST_TOKENS,
    max_bad_fraction=0.9,
    vocab_size=128,
)
tokenizer = cache(build_tokenizer)


def call(data: bytes) -> PromptSet:
    """Load the file with a tokenizer of one id a character."""
    return load_prompts(written("rows.jsonl", data), tokenizer(), RULES)


def oracle(data: bytes, found: PromptSet) -> str | None:
    """The prompts are those of an obvious reader, and no row is lost."""
    if NOT_LINES.match(data):  # read as an array, see targets/data_files.py
        return None
    rows = [line for number, line in enumerate(data.split(b"\n")) if not _blank(line, number)]
    if found.tally.rows != len(rows) or len(found.prompts) + sum(
        found.tally.skipped.values()
    ) != len(rows):
        return "rows are lost"
    usable = [
        row for number, line in enumerate(data.split(b"\n")) if (row := _usable(line, number))
    ]
    short = [row for row in usable if len(row["prompt"]) <= MOST_TOKENS]
    if len(usable) - len(short) != found.tally.skipped.get(TOO_LONG, 0):
        return "long prompts are not counted"
    if [prompt.text for prompt in found.prompts] != [row["prompt"] for row in short]:
        return "a prompt is taken that an obvious reader refuses, or the reverse"
    for prompt, row in zip(found.prompts, short, strict=True):
        if isinstance(row["answer"], list):
            continue
        assert not isinstance(prompt.answer, tuple)
        text = prompt.answer or ""
        if isinstance(row["answer"], str) and text != row["answer"]:
            return "an answer is changed"
        number = row["answer"]
        if not isinstance(number, str) and type(number)(text) != number:
            return "a number is another one"
    return None


def _decoded(line: bytes, number: int) -> str | None:
    try:
        return line.decode("utf-8-sig" if number == 0 else "utf-8")
    except UnicodeDecodeError:
        return None


def _blank(line: bytes, number: int) -> bool:
    text = _decoded(line, number)
    return text is not None and not text.strip()


def _usable(line: bytes, number: int) -> dict[str, Any] | None:
    """The row by the documented policy, the slow way."""
    try:
        row = json.loads(_decoded(line, number) or "", object_pairs_hook=_pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    prompt, answer = row.get("prompt"), row.get("answer")
    if not isinstance(prompt, str) or not prompt.strip() or _lone(prompt):
        return None
    several = answer if isinstance(answer, list) else [answer]
    kept = [each for each in several if not _gap(each)]
    return row if kept and all(map(_written, kept)) else None


def _gap(answer: Any) -> bool:
    blank = isinstance(answer, str) and not answer.strip()
    return answer is None or blank or (isinstance(answer, float) and math.isnan(answer))


def _written(answer: Any) -> bool:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return False
    if isinstance(answer, str):
        return not _lone(answer)
    return abs(answer) < 2**4096 if isinstance(answer, int) else math.isfinite(answer)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("twice")
    return dict(pairs)


def _lone(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _lines(trees: list[Any]) -> bytes:
    return b"".join(json.dumps(tree).encode() + b"\n" for tree in trees)


TREES = damaged_tree(ROWS)


def damaged_rows(rng: Random) -> bytes:
    """Some rows, damaged and whole."""
    makers = (TREES, TREES, lambda rng: rng.choice(ROWS))
    return _lines([rng.choice(makers)(rng) for _ in range(rng.randint(1, 5))])


FILES = [_lines(ROWS), _lines(ROWS[:1]), b"\xef\xbb\xbf" + _lines(ROWS[1:3])]
TARGET = Target(
    "jsonl",
    one_of(damaged_rows, damaged_bytes(FILES)),
    call,
    (ValueError,),
    oracle,
    share=2,
)
