"""Encodes what a server is told of the weights that it will receive. Torch-free.

The routes are the same for all servers of one layout, and their text is made once; a server's own
head says where it is. Every rank of the server computes its messages from both.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from sglang_bridge.weights.schedule import Limits, Place, Route, incoming

STAGED, PAUSED = "staged", "paused"
MAX_BYTES = 1 << 30
"""Largest size of the routes as JSON: those of a model of several million tensors."""
MAX_PARTS = 1 << 24
"""Most parts of a rank's messages: more would be of buckets too small to be meant."""


class BadShare(ValueError):
    """Reports in one line that a text is not what `encode_share` makes."""


def encode_routes(staged: Sequence[Route], paused: Sequence[Route]) -> str:
    """Encode the routes to one server: before the pause into shadow buffers, and in the pause."""
    sources: dict[tuple[int, ...], int] = {}
    rows: dict[str, list[list[Any]]] = {}
    for key, routes in ((STAGED, staged), (PAUSED, paused)):
        rows[key] = [
            [r.name, r.dim, r.start, r.length, r.destination, r.turn, r.elements, held, r.kind]
            for r in routes
            for held in (sources.setdefault(r.sources, len(sources)),)
        ]
    text = json.dumps({"sources": list(sources), **rows}, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 1)).decode("ascii")


def encode_share(routes: str, place: Place, limits: Limits) -> str:
    """Return the text for the server at `place`. routes: of encode_routes."""
    head = [place.index, place.first, limits.receivers, limits.max_elements]
    return f"{json.dumps(head, separators=(',', ':'))} {routes}"


def decode_share(text: str, rank: int) -> dict[str, list[Any]]:
    """Return the messages that rank `rank` receives: {STAGED: messages, PAUSED: messages}.

    A message is [sender, [[tensor, dimension, start, length], ...]]. BadShare: it is no share.
    """
    head, _, routes = text.partition(" ")
    try:
        index, first, receivers, max_elements = json.loads(head)
        raw = _inflated(base64.b64decode(routes, validate=True))
        tree = json.loads(raw)
        sources = [tuple(ranks) for ranks in tree["sources"]]
        place, limits = Place(index, first), Limits(receivers, max_elements)
        found: dict[str, list[Any]] = {}
        for key in (STAGED, PAUSED):
            listed = [
                Route(name, dim, start, length, rank, sources[held], turn, elements, kind)
                for name, dim, start, length, destination, turn, elements, held, kind in tree[key]
                if destination == rank
            ]
            if sum(route.elements for route in listed) // max_elements > MAX_PARTS:
                raise ValueError(f"more than {MAX_PARTS} messages of {max_elements} numbers")
            found[key] = [
                [b.source, [[p.name, p.dim, p.start, p.length] for p in b.parts]]
                for b in incoming(listed, place, rank, limits)
            ]
        return found
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, zlib.error) as error:
        raise BadShare(f"no list of weights: {type(error).__name__}: {error}") from None


def _inflated(data: bytes) -> bytes:
    """Return at most MAX_BYTES of decompressed data: a small text must not fill the memory."""
    engine = zlib.decompressobj()
    raw = engine.decompress(data, MAX_BYTES)
    if engine.unconsumed_tail or not engine.eof:
        raise ValueError(f"more than {MAX_BYTES} bytes, or cut short")
    return raw
