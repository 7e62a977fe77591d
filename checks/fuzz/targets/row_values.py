"""Rows of nested values, verl's tables and hostile messages -> records, from JSON and parquet."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_tree
from checks.fuzz.places import written
from megatron_opd.data.chats import ChatMessage
from megatron_opd.data.faults import Fault
from megatron_opd.data.records import Columns, Record, scan_records

CALL = {"id": "c", "function": {"name": "f", "arguments": {"a": "x", "b": 2}}}
TEXTUAL = {"id": "c", "function": {"name": "f", "arguments": '{"a": "x"}'}}
ROWS: list[Any] = [
    {
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 3, "split": "train"},
    },
    {
        "prompt": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": "r"},
            {"role": "assistant", "reasoning_content": "t", "content": "w"},
            {"role": "user", "content": "b"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "reward_model": {"ground_truth": ["2", "2.0"]},
    },
    {
        "prompt": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}],
        "reward_model": {"ground_truth": 0.5},
    },
    {"prompt": [{"role": "assistant", "tool_calls": [TEXTUAL]}, {"role": "user", "content": "x"}]},
    {"prompt": "text", "reward_model": {"ground_truth": 7}, "extra_info": {"index": "a.b"}},
]
ANSWER, NAME = "reward_model.ground_truth", "extra_info.index"
COLUMNS = Columns(chats=("prompt",), tools="tools", answers=(ANSWER,), names=(NAME,))
Scanned = tuple[str, Record] | Fault


def call(row: Any) -> tuple[Scanned, Scanned | None, Scanned | str]:
    """Read one row as JSONL, as parquet (None: no table holds it), and as NumPy has it."""
    path = written("values.jsonl", json.dumps(row).encode() + b"\n")
    (found,) = scan_records(path, COLUMNS)
    arrays: Scanned | str = "no row"
    if isinstance(row, dict):
        try:
            arrays = "row", COLUMNS.record({key: _numpy(each) for key, each in row.items()})
        except Exception as error:
            if type(error).__name__ != "Unusable" or "\n" in str(error):
                raise
            arrays = str(error)
    return found, _through_parquet(row), arrays


def _through_parquet(row: Any) -> Scanned | None:
    if len(repr(row)) % 4:
        return None  # a table takes ten times as long as all else
    try:
        table = pyarrow.Table.from_pylist([row] if isinstance(row, dict) else [])
        if not table.num_columns or "prompt" not in table.column_names:
            return None
        if table.to_pylist() != [row]:
            return None  # arrow has changed it: keys of null, or numbers of another type
        parquet.write_table(table, path := written("values.parquet", b""))
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, RecursionError):
        return None
    (found,) = scan_records(path, COLUMNS)
    return found


def _numpy(value: Any) -> Any:
    if isinstance(value, list):
        made = np.empty(len(value), dtype=object)
        for index, each in enumerate(value):
            made[index] = _numpy(each)
        return made
    if isinstance(value, dict):
        return {key: _numpy(each) for key, each in value.items()}
    if isinstance(value, str):
        return np.str_(value)
    if type(value) is float:
        return np.float64(value)
    if type(value) is int and abs(value) < 2**63:
        return np.int64(value)
    return value


def oracle(row: Any, found: tuple[Scanned, Scanned | None, Scanned | str]) -> str | None:
    """The texts are those of the row, and a row is the same one in every kind of file."""
    as_json, as_parquet, as_numpy = found
    if isinstance(as_json, Fault):
        return "a fault of several lines" if "\n" in str(as_json) else None
    record = as_json[1]
    if isinstance(as_parquet, tuple) and as_parquet[1] != record:
        return "parquet gives another record"
    if isinstance(as_numpy, tuple) and not _has_null(row) and as_numpy[1] != record:
        return "NumPy gives another record"
    return _changed_chat(row["prompt"], record["prompt"]) or _changed_answer(row, record[ANSWER])


def _has_null(value: Any) -> bool:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, held))


def _changed_chat(given: Any, read: Any) -> str | None:
    if isinstance(given, str):
        text = read if isinstance(read, str) else "".join(m.content for m in read)
        try:
            json.loads(given)
        except ValueError:
            return None if text == given else "a text is changed"
        return None
    for message, one in zip(given, read, strict=True):
        assert isinstance(one, ChatMessage)
        content = message.get("content", message.get("value"))
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        if message.get("from") != "function_call" and (content or "") != one.content:
            return "a message is changed"
        for name, each in message.items():
            kept = name in ("role", "content", "from", "value", "tool_calls") or each is None
            if not kept and one.others.get(name) != each:
                return "a key of a message is lost"
    return None


def _changed_answer(row: Any, read: Any) -> str | None:
    holder = row[ANSWER] if ANSWER in row else (row.get("reward_model") or {})
    given = holder.get("ground_truth") if isinstance(holder, dict) else holder
    several = given if isinstance(given, list) else [given]
    told = () if read is None else (read,) if isinstance(read, str) else read
    for each in several:
        if isinstance(each, str) and each.strip() and each not in told:
            return "an answer is changed"
        number = isinstance(each, int | float) and not (
            isinstance(each, float) and math.isnan(each)
        )
        if number and not any(_is(text, each) for text in told):
            return "a number is another one"
    return None


def _is(text: str, number: Any) -> bool:
    try:
        return type(number)(text) == number
    except ValueError:
        return False


TREES = damaged_tree(ROWS)


def rows(rng: Random) -> Any:
    """A row, damaged or whole."""
    return TREES(rng) if rng.random() < 0.9 else rng.choice(ROWS)


TARGET = Target("row_values", rows, call, (ValueError,), oracle)
