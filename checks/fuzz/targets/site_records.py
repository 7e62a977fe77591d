"""What a site and its learner say to each other -> a record, at either end."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, msgpack_bytes
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.sites import messages as m
from megatron_opd.wire.codec import BadMessage

SHAPE = ScoreShape(3, -1.0, 0.5, 0)
TO_LEARNER: tuple[m.ToLearner, ...] = (
    m.SiteHello(
        m.PROTOCOL, "near", "p", 4, True, {"run.seed": "ab"}, 1, 2, 512, [5, 9], 1.5e9, [3, 4]
    ),
    *(m.Serving(3), m.Gone(5, "empty_response", "prompt 5"), m.Leaving()),
    m.SiteDone(7, "stop", 0.5, 1.5e9, 2.0, "http://127.0.0.1:1", 0, SHAPE, 0.5, 0.0, False),
    m.Want("0000-v1", "rank00000.safetensors", 0, 4096),
)
TO_SITE: tuple[m.ToSite, ...] = (
    *(m.SiteWelcome("run", 9, [3]), m.Forget([4]), m.MissingPiece("v"), m.Farewell(None)),
    m.SiteTask(7, "2+2=", b"u1\0\0\1", "4", "teacher", 8, ("\n",), None, "row", 1, 1.0, 1.0),
    m.Offer(1, "v", "u", [m.FileSize("f", 9, bytes(32))]),
    *(m.FilePiece("v", "f", 0), m.Farewell("another tokenizer")),
)
ENDS = {"learner": (m.decode_to_learner, TO_LEARNER), "site": (m.decode_to_site, TO_SITE)}
Given = tuple[str, bytes]
"""At which end it is read, and its bytes."""
Found = m.ToLearner | m.ToSite


def call(given: Given) -> Found:
    """Read it."""
    end, data = given
    return ENDS[end][0](data)


def oracle(given: Given, found: Found) -> str | None:
    """It is the same record when it is sent on, of those that this end is sent."""
    end, data = given
    decode, healthy = ENDS[end]
    if type(found) not in {type(record) for record in healthy}:
        return "a record of the other direction"
    if m.encode(decode(m.encode(found))) != m.encode(found):
        return "a record is another one when it is sent on"
    tree = msgspec.msgpack.decode(data)
    if not isinstance(tree, dict) or not tree.keys() <= {*found.__struct_fields__, "type"}:
        return "fields that are none"
    return None


def _makers(records: tuple[Found, ...]) -> tuple[Any, Any]:
    frames = [m.encode(record) for record in records]
    return damaged_tree(list(map(msgspec.msgpack.decode, frames)), most=2), damaged_bytes(frames)


MAKERS = {end: _makers(records) for end, (_, records) in ENDS.items()}


def make(rng: Random) -> Given:
    """A record after damage to its tree or its bytes, at the right end or the wrong one."""
    made_for, read_at = rng.choice(list(ENDS)), rng.choice(list(ENDS))
    trees, raw = MAKERS[made_for]
    end = made_for if rng.random() < 0.9 else read_at
    return end, msgpack_bytes(trees(rng)) if rng.random() < 0.7 else raw(rng)


TARGET = Target("site_records", make, call, (BadMessage,), oracle)
