"""What a server is told of weights to come -> the messages that its rank waits for."""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from random import Random
from typing import Any

import torch

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree
from sglang_bridge.server.pieces import Piece, by_name
from sglang_bridge.server.receiver import BadExpectation, Receiver
from sglang_bridge.server.shadows import Shadows
from sglang_bridge.weights.exchange import Message
from sglang_bridge.weights.message_order import Limits, Route, SlicePlace
from sglang_bridge.weights.share import BadShare, decode_share, encode_routes, encode_share

RANK, SENDERS = 0, 2
NORM, MATRIX = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
STACK = "model.layers.0.linear_attn.in_proj_qkv.weight"
PLACE, NAMES = SlicePlace(0, (0, 1)), ("http://h:1", "http://h:2")
LIMITS = Limits(SENDERS, 2, 1 << 20, relays=True)


def route(name: str, dim: int, start: int, length: int, elements: int, source: int) -> Route:
    """A slice on its way to rank 0 of each server."""
    return Route(name, dim, start, length, RANK, (source,), 0, elements)


STAGED = (route(NORM, 0, 0, 4, 4, 0), route(NORM, 0, 4, 4, 4, 1))
PAUSED = (
    route(MATRIX, 1, 8, 4, 24, 0),
    route(MATRIX, 1, 12, 4, 24, 1),
    route(STACK, 0, 0, 4, 12, 0),
    route(STACK, 0, 16, 4, 12, 1),
)
Given = str


@cache
def held() -> dict[str, Piece]:
    """What the rank holds: a norm, columns 8 to 16 of a matrix, two ranges of rows of another."""
    return by_name(
        [
            Piece(NORM, 0, 0, 8, torch.zeros(8)),
            Piece(MATRIX, 1, 8, 8, torch.zeros(6, 8)),
            Piece(STACK, 0, 0, 4, torch.zeros(4, 3)),
            Piece(STACK, 0, 16, 4, torch.zeros(4, 3)),
        ]
    )


def call(text: Given) -> tuple[int, Receiver]:
    """As the plugin of one rank does; returns the bytes to come."""
    receiver: Any = object.__new__(Receiver)
    receiver._pieces, receiver._shadows, receiver._lost = held(), Shadows({}), None
    receiver._names = {NORM: [NORM], MATRIX: [MATRIX], STACK: [n for n in held() if STACK in n]}
    receiver._staged = receiver._paused = ()
    size = receiver.expect(decode_share(text, RANK))
    return size, receiver


def oracle(text: Given, found: tuple[int, Receiver]) -> str | None:
    """Every number of every parameter comes exactly once, of one dtype a message."""
    size, receiver = found
    pieces: Any = receiver._pieces
    counts = {name: torch.zeros_like(piece.view) for name, piece in pieces.items()}
    steps = [*receiver._staged, *receiver._paused]
    messages = [step for step in steps if isinstance(step, Message)]
    memory = {
        **{name: piece.view for name, piece in pieces.items()},
        **receiver._shadows.memory,
    }
    for message in messages:
        if message.peer < 0:
            return "weights of nobody"
        for view in message.views:
            name, base = next(
                each for each in memory.items() if each[1].data_ptr() == storage_of(view)
            )
            place = torch.zeros(base.numel()).as_strided(base.shape, base.stride())
            offset = view.storage_offset() - base.storage_offset()
            flat = torch.zeros(base.numel())
            flat.as_strided(view.shape, view.stride(), offset).fill_(1)
            counts[name] += flat.as_strided(base.shape, base.stride()) + place
    if any(bool((count != 1).any()) for count in counts.values()):
        return "numbers that come twice, or never"
    if size != sum(message.nbytes for message in messages):
        return "other bytes than are to come"
    return None


def storage_of(view: torch.Tensor) -> int:
    """Where the memory begins that a view is of: that of one piece."""
    return view.untyped_storage().data_ptr()


WHOLE = encode_share(encode_routes(STAGED, PAUSED), PLACE, NAMES, LIMITS)
HEAD, _, ROUTES = WHOLE.rpartition(" ")
HEADS = damaged_tree([json.loads(HEAD)], most=2)
TREES = damaged_tree([json.loads(zlib.decompress(base64.b64decode(ROUTES)))], most=2)
BYTES = damaged_bytes([WHOLE.encode()], most=2)
ODD = (-1, 0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 2**31, 2**62)


def _packed(tree: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(tree).encode(), 1)).decode()


def _odd_route(rng: Random) -> str:
    """The routes with one or two other numbers."""
    tree = json.loads(zlib.decompress(base64.b64decode(ROUTES)))
    for _ in range(rng.randint(1, 2)):
        row = rng.choice(tree[rng.choice(("staged", "paused"))])
        at = rng.randrange(1, len(row))
        row[at] = rng.choice((*ODD, row[at]))
    if rng.random() < 0.2:
        rows = tree[rng.choice(("staged", "paused"))]
        rows.append(rng.choice(rows))
    return _packed(tree)


def make(rng: Random) -> Given:
    """A share after damage to its head, its routes or its text."""
    kind = rng.random()
    if kind < 0.45:
        return f"{HEAD} {_odd_route(rng)}"
    if kind < 0.65:
        return f"{HEAD} {_packed(TREES(rng))}"
    if kind < 0.85:
        return f"{json.dumps(HEADS(rng), separators=(',', ':'))} {ROUTES}"
    return BYTES(rng).decode("utf-8", "replace")


TARGET = Target("weight_shares", make, call, (BadShare, BadExpectation), oracle)
