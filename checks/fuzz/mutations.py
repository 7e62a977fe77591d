"""Makers of hostile inputs: valid ones damaged in their bytes or in the nodes of their tree.

A maker draws from a `random.Random` alone, so that target, seed, chunk and number make an input
again. (hypothesis' strategies were tried: they repeat themselves, and 300 of their inputs to one
border held 11 that differed and were accepted; what shrinks well explores badly.)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

Maker = Callable[[Random], Any]

# What a format may spell and a reader may not expect.
TEXTS = (
    *("", " ", "\0", "\n", "\x1b[31m", "\ud800", "é", "\u202e", "'", '"', "{{", "{%", "$", "\\"),
    *("true", "null", "NaN", "-1", "1e999", "0x10", "010", "1:30", "5", "off", "None", "inf"),
    *("../../etc/passwd", "a" * 5000, "[red]", "%s%n", "<eos>", "model.norm.weight", "F32"),
)
NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 64, 1000, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 5.0, -0.5, 1e-300, 1e-9, 1e20, 1e308),
    *(float("inf"), float("-inf"), float("nan")),
)
BYTES = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\n", b"\x80", b"[" * 3000, b'{"a":' * 1500),
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b'"\\ud800"', b"\x1b[2J", b"\xff" * 8, b"true"),
    *(
        b"null",
        b'""',
        b"{}",
        b"[]",
        b"-1",
        b": ",
        b", ",
        b"  ",
        b'"',
        b"'",
        b"&a ",
        b"*a",
        b"!!int ",
    ),
)


def one_of(*makers: Maker) -> Maker:
    """Any of them, equally often."""
    return lambda rng: rng.choice(makers)(rng)


def joined(parts: Sequence[str], most: int) -> Maker:
    """Up to `most` of `parts` in a row."""
    return lambda rng: "".join(rng.choices(parts, k=rng.randint(0, most)))


def damaged_bytes(corpus: Sequence[bytes], most: int = 4) -> Maker:
    """One of `corpus` after 1 to `most` edits: flips, cuts, repetitions, insertions."""

    def make(rng: Random) -> bytes:
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randint(1, most)):
            _edit_bytes(rng, data)
        return bytes(data)

    return make


def _edit_bytes(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data) or 1)
    length = rng.choice((1, 1, 2, 4, 8, 16))
    edit = rng.choice(("flip", "cut", "end", "repeat", "insert", "random", "overwrite", "swap"))
    if edit == "flip" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif edit == "cut":
        del data[at : at + length]
    elif edit == "end" and rng.random() < 0.3:
        del data[at:]
    elif edit == "repeat":
        data[at:at] = data[at : at + 4 * length] * rng.randint(1, 3)
    elif edit == "insert":
        data[at:at] = rng.choice(BYTES)
    elif edit == "random":
        data[at:at] = rng.randbytes(length)
    elif edit == "overwrite":
        data[at : at + length] = rng.randbytes(length)
    elif data:
        other = rng.randrange(len(data))
        data[at], data[other] = data[other], data[at]


def damaged_tree(corpus: Sequence[Any], most: int = 3) -> Maker:
    """One of `corpus` after 1 to `most` edits of nodes: replaced, removed, renamed, doubled."""

    def make(rng: Random) -> Any:
        tree = copy.deepcopy(rng.choice(corpus))
        for _ in range(rng.randint(1, most)):
            holders = [node for node in _nodes(tree) if isinstance(node, dict | list) and node]
            if not holders:
                return hostile_value(rng)
            _edit_node(rng, rng.choice(holders))
        return tree

    return make


def _edit_node(rng: Random, holder: Any) -> None:
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = rng.choice(keys)
    kind = rng.choice(("similar", "similar", "similar", "replace", "retype", "remove", "rename"))
    if kind == "similar":
        holder[key] = _similar(rng, holder[key])
    elif kind == "replace":
        holder[key] = hostile_value(rng)
    elif kind == "retype":
        old = holder[key]
        holder[key] = rng.choice((str(old), repr(old), [old], {"a": old}, bool(old)))
    elif kind == "remove":
        del holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice((*keys, *TEXTS))] = holder.pop(key)
    else:
        holder.append(holder[key])


def _similar(rng: Random, value: Any) -> Any:
    """Another value of the same kind, which a check of types alone lets through."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        if rng.random() < 0.6 or abs(value) > 1e300:
            return rng.choice(NUMBERS)
        return rng.choice((value + 1, value - 1, -value, value * 2, value / 2, float(value)))
    if isinstance(value, str):
        return rng.choice((rng.choice(TEXTS), value + rng.choice(TEXTS), value.upper(), value[:-1]))
    if isinstance(value, bytes):
        longer = value + rng.randbytes(rng.choice((1, 2, 4)))
        return rng.choice((value[:-1], longer, rng.choice(BYTES) + value, value[4:], b""))
    if isinstance(value, list) and value:
        return rng.choice((value[:-1], value * 2, value[::-1], [value], []))
    return hostile_value(rng)


def hostile_value(rng: Random, depth: int = 0) -> Any:
    """A value of any JSON type, mostly an odd one, or a small tree of them."""
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((True, False, None))
    if kind == 3:
        return rng.choice((rng.randint(-10, 300), rng.uniform(-2, 2), chr(rng.randrange(0xD000))))
    items = [hostile_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return items if kind == 4 else {rng.choice(TEXTS): item for item in items}


def _nodes(tree: Any) -> list[Any]:
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return found


def json_bytes(tree: Any) -> bytes:
    """JSON as Python writes it: NaN, infinities and lone surrogates included."""
    return json.dumps(tree).encode()


def msgpack_bytes(tree: Any) -> bytes:
    """Msgpack, with what it cannot hold as the nearest that it can."""
    return msgspec.msgpack.encode(_held(tree))


def _held(node: Any) -> Any:
    if isinstance(node, dict):
        return {_held(key): _held(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_held(item) for item in node]
    if isinstance(node, str):
        return node.encode("utf-8", "replace").decode()
    if isinstance(node, int):
        return min(max(node, -(2**63)), 2**64 - 1)
    return node


def damaged_json(corpus: Sequence[Any]) -> Maker:
    """JSON files damaged in their tree (two of three) or in their bytes."""
    trees, texts = damaged_tree(corpus), damaged_bytes([json_bytes(each) for each in corpus])

    def tree(rng: Random) -> bytes:
        return json_bytes(trees(rng))

    return one_of(tree, tree, texts)
