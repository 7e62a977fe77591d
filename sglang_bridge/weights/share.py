"""Encodes what a server is told of the weights that it will receive. Torch-free.

The routes are the same for all servers of one layout, and their text is made once; a server's own
head says where it is, and where the others of its layout are. Every rank of the server computes its
messages from both.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from sglang_bridge.errors import one_line
from sglang_bridge.weights.message_order import Bucket, Limits, Onward, Route, SlicePlace, incoming

STAGED, PAUSED = "staged", "paused"
PEERS = "peers"
MAX_BYTES = 1 << 30
"""Largest size of the routes as JSON: those of a model of several million tensors."""
MAX_PARTS = 1 << 24
"""Most parts of a rank's messages: more would be of buckets too small to be meant."""


_UNREADABLE = (RecursionError, zlib.error)


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


def encode_share(routes: str, place: SlicePlace, names: Sequence[str], limits: Limits) -> str:
    """Return the text for the server at `place`.

    routes: of encode_routes. names: of the servers of its layout, for errors.
    """
    at = [place.index, place.firsts, names]
    held = [limits.senders, limits.receivers, limits.max_elements, limits.relays, limits.near]
    head = [*at, *held]
    return f"{json.dumps(head, separators=(',', ':'))} {routes}"


def decode_share(text: str, rank: int) -> dict[str, Any]:
    """Return what rank `rank` does: {STAGED: messages, PAUSED: messages, PEERS: names}.

    A message that it receives is [sender, [[tensor, dimension, start, length], ...]]. One that it
    passes on is [receiver, number], the number of one that it has received before, among those of
    the same list. Senders and receivers are ranks of the group; names has text for those that are
    ranks of servers. BadShare: it is no share.
    """
    head, _, routes = text.rpartition(" ")
    try:
        index, firsts, names, senders, receivers, max_elements, relays, near = json.loads(head)
        place = SlicePlace(index, tuple(firsts))
        limits = Limits(senders, receivers, max_elements, relays, tuple(near))
        if not 0 <= index < len(firsts) == len(names):
            raise ValueError(f"no server {index} among {len(firsts)} of {len(names)} names")
        raw = _inflated(base64.b64decode(routes, validate=True))
        tree = json.loads(raw)
        sources = [tuple(ranks) for ranks in tree["sources"]]
        peers = {
            senders + first + rank: f"{name} rank {rank}"
            for first, name in zip(firsts, names, strict=True)
        }
        found: dict[str, Any] = {PEERS: peers}
        for key in (STAGED, PAUSED):
            listed = [
                Route(name, dim, start, length, rank, sources[held], turn, elements, kind)
                for name, dim, start, length, destination, turn, elements, held, kind in tree[key]
                if destination == rank
            ]
            if sum(route.elements for route in listed) // max_elements > MAX_PARTS:
                raise ValueError(f"more than {MAX_PARTS} messages of {max_elements} numbers")
            found[key] = [_entry(step, limits) for step in incoming(listed, place, rank, limits)]
        return found
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RecursionError,
        zlib.error,
    ) as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise BadShare(f"no list of weights: {why}") from None


def _entry(step: Bucket | Onward, limits: Limits) -> list[Any]:
    """Return a step as decode_share does."""
    if isinstance(step, Onward):
        return [limits.senders + step.receiver, step.number]
    return [step.sender, [[p.name, p.dim, p.start, p.length] for p in step.parts]]


def _inflated(data: bytes) -> bytes:
    """Return at most MAX_BYTES of decompressed data: a small text must not fill the memory."""
    engine = zlib.decompressobj()
    raw = engine.decompress(data, MAX_BYTES)
    if engine.unconsumed_tail or not engine.eof:
        raise ValueError(f"more than {MAX_BYTES} bytes, or cut short")
    return raw
