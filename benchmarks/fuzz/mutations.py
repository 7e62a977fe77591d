"""Strategies that damage valid inputs: bytes of a file, and nodes of a JSON or YAML tree."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

# What a format may spell and a reader may not expect.
HOSTILE_TEXTS = (
    *("", " ", "\0", "\n", "\x1b[31m", "\ud800", "é", "\u202e", "'", '"', "{{", "{%", "$", "\\"),
    *("true", "null", "NaN", "-1", "1e999", "0x10", "5", "../../etc/passwd", "a" * 5000),
)
HOSTILE_NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.5, 1e-300),
    *(1e20, 1e308, float("inf"), float("-inf"), float("nan")),
)
HOSTILE_BYTES = (
    *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\x80", b"[" * 3000, b'{"a":' * 1500),
    *(b"NaN", b"Infinity", b"1e999", b"9" * 5000, b'"\\ud800"', b"\x1b[2J", b"\xff" * 8),
)


def hostile_values() -> st.SearchStrategy[Any]:
    """Values of every JSON type, the odd ones first, and small random trees."""
    leaves = st.one_of(
        st.sampled_from(HOSTILE_NUMBERS),
        st.sampled_from(HOSTILE_TEXTS),
        st.sampled_from((True, False, None)),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    )


@st.composite
def damaged_bytes(draw: st.DrawFn, corpus: Sequence[bytes], most: int = 4) -> bytes:
    """One of `corpus` after 1 to `most` edits: flips, cuts, repetitions, insertions."""
    data = bytearray(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(1, 16))
        edit = draw(
            st.sampled_from(("flip", "cut", "end", "repeat", "insert", "overwrite", "swap"))
        )
        if edit == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == "cut":
            del data[at : at + length]
        elif edit == "end":
            del data[at:]
        elif edit == "repeat":
            data[at:at] = data[at : at + length] * draw(st.integers(1, 4))
        elif edit == "insert":
            data[at:at] = draw(st.sampled_from(HOSTILE_BYTES) | st.binary(max_size=8))
        elif edit == "overwrite":
            new = draw(st.binary(min_size=1, max_size=8))
            data[at : at + len(new)] = new
        elif data:
            other = draw(st.integers(0, len(data) - 1))
            data[at], data[other] = data[other], data[at]
    return bytes(data)


@st.composite
def damaged_tree(draw: st.DrawFn, corpus: Sequence[Any], most: int = 3) -> Any:
    """One of `corpus` after 0 to `most` edits of nodes: replaced, removed, renamed, doubled."""
    tree = copy.deepcopy(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(0, most))):
        holders = [node for node in _nodes(tree) if isinstance(node, dict | list) and node]
        if not holders:
            return draw(hostile_values())
        holder = holders[draw(st.integers(0, len(holders) - 1))]
        _edit(draw, holder)
    return tree


def _edit(draw: st.DrawFn, holder: Any) -> None:
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = keys[draw(st.integers(0, len(keys) - 1))]
    kind = draw(st.sampled_from(("replace", "replace", "replace", "retype", "remove", "rename")))
    if kind == "replace":
        holder[key] = draw(hostile_values())
    elif kind == "retype":
        holder[key] = draw(st.sampled_from((str, repr, lambda x: [x], lambda x: {"a": x}, bool)))(
            holder[key]
        )
    elif kind == "remove":
        del holder[key]
    elif isinstance(holder, dict):
        holder[draw(st.text(max_size=6))] = holder.pop(key)
    else:
        holder.append(holder[key])


def _nodes(tree: Any) -> list[Any]:
    found = [tree]
    if isinstance(tree, dict):
        for value in tree.values():
            found += _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            found += _nodes(value)
    return found


def json_bytes(tree: Any) -> bytes:
    """JSON as Python writes it: NaN, infinities and lone surrogates included."""
    return json.dumps(tree).encode()


def damaged_json(corpus: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """JSON files damaged in their tree or in their bytes."""
    return damaged_tree(corpus).map(json_bytes) | damaged_bytes([json_bytes(c) for c in corpus])
