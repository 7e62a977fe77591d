"""A parquet file of prompts, its bytes damaged or its columns of odd types."""

from __future__ import annotations

import io
from random import Random
from typing import Any

import pyarrow
from pyarrow import parquet

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, one_of
from checks.fuzz.places import written
from checks.fuzz.targets.jsonl import MOST_TOKENS, RULES, tokenizer
from megatron_opd.data.prompts import PromptSet, load_prompts

COLUMNS: tuple[Any, ...] = (
    pyarrow.array(["1+1=", "2+2=", None, "3"]),
    pyarrow.array(["2", "", "x", "é" * 60]),
    pyarrow.array([1, 2, 3, None]),
    pyarrow.array([1.5, float("nan"), None, 3.0]),
    pyarrow.array([True, False, None, True]),
    pyarrow.array([b"\xff\xfe", b"a", b"", None]),
    pyarrow.array([[1], [], None, [2, 3]]),
    pyarrow.array([{"a": 1}, None, {"a": 2}, {"a": 3}]),
    pyarrow.array(["a", "b", "a", "b"]).dictionary_encode(),
    pyarrow.array([2**62, -(2**62), 0, 1], pyarrow.timestamp("ns")),
    pyarrow.array([None] * 4),
    pyarrow.array(["1", "2", "3", "4"], pyarrow.large_string()),
    pyarrow.StringArray.from_buffers(
        4,
        pyarrow.py_buffer(bytes(pyarrow.array([0, 1, 2, 3, 4], pyarrow.int32()).buffers()[1])),
        pyarrow.py_buffer(b"\xff\xc3\x28a"),
    ),
)


def file_of(names: list[str], columns: list[Any], compression: str = "snappy") -> bytes:
    """A parquet file; names may repeat."""
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns, names=names), out, compression=compression)
    return out.getvalue()


CORPUS = [
    file_of(["prompt", "answer"], [COLUMNS[0], COLUMNS[1]]),
    file_of(["prompt", "answer"], [COLUMNS[8], COLUMNS[2]], "none"),
    file_of(["prompt", "answer", "x"], [COLUMNS[11], COLUMNS[3], COLUMNS[6]], "gzip"),
]


def tables(rng: Random) -> bytes:
    """A file whose columns have names and types drawn at random, now and then a whole one."""
    if rng.random() < 0.1:
        return rng.choice(CORPUS)
    names = rng.choices(("prompt", "prompt", "answer", "answer", "x"), k=rng.randint(1, 4))
    return file_of(names, [rng.choice(COLUMNS) for _ in names])


def call(data: bytes) -> PromptSet:
    """Load the file."""
    return load_prompts(written("rows.parquet", data), tokenizer(), RULES)


def oracle(data: bytes, found: PromptSet) -> str | None:
    """No row is lost; a prompt has text, an answer and no more tokens than allowed."""
    if len(found.prompts) + sum(found.tally.skipped.values()) != found.tally.rows:
        return "rows are lost"
    for prompt in found.prompts:
        answers = prompt.answer if isinstance(prompt.answer, tuple) else (prompt.answer or "",)
        none = {"", "nan", "inf", "-inf", "true", "false"}
        if not prompt.text.strip() or none & {answer.strip().lower() for answer in answers}:
            return "an empty prompt, or an answer that is none"
        if not 0 < len(prompt.token_ids_P) <= MOST_TOKENS:
            return "a prompt of no or too many tokens"
    return None


TARGET = Target("parquet", one_of(damaged_bytes(CORPUS), tables), call, (ValueError,), oracle)
