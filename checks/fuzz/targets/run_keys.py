"""What stands in run.keys, and in the variable that hands a rank its part."""

from __future__ import annotations

import json
from random import Random

import zmq
from zmq.utils import z85

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_json
from checks.fuzz.places import written
from megatron_opd.wire.keys import KEYS_FILE, RankKeys, RunKeys

KEYS = RunKeys(
    z85.encode(bytes(range(32))), z85.encode(bytes(range(32, 64))), {"student": "a" * 43}
)
VALID = {
    "controller": KEYS.controller.decode(),
    "learner": KEYS.learner.decode(),
    "servers": dict(KEYS.servers),
}
VARIABLE = KEYS.ranks.text()
Given = bytes | str
"""The file's content, or the variable's."""


def call(given: Given) -> RunKeys | RankKeys:
    """Read them as the controller does, or as a rank does."""
    if isinstance(given, str):
        return RankKeys.parse(given)
    path = written(KEYS_FILE, given)
    path.chmod(0o600)
    keys = RunKeys.read(path)
    assert keys is not None
    return keys


def oracle(given: Given, keys: RunKeys | RankKeys) -> str | None:
    """What is taken is what was given, and a socket takes it."""
    if isinstance(keys, RankKeys):
        return None if keys.text() == given else "other keys than the variable's"
    tree = json.loads(given)
    if (keys.controller.decode(), keys.learner.decode()) != (tree["controller"], tree["learner"]):
        return "other keys than the file's"
    if any(not isinstance(key, str) or not key.isprintable() for key in keys.servers.values()):
        return "an API key that no header takes"
    public = z85.decode(zmq.curve_public(keys.learner))
    return None if len(public) == 32 else "a key that no socket takes"


MAKE = damaged_json([VALID])


def make(rng: Random) -> Given:
    """The file or the variable, mostly damaged."""
    if rng.random() < 0.7:
        return MAKE(rng) if rng.random() < 0.98 else json.dumps(VALID).encode()
    letters = list(VARIABLE)
    for _ in range(rng.randrange(3)):
        letters[rng.randrange(len(letters))] = chr(rng.randrange(0x250))
    return "".join(letters[: rng.randrange(len(letters) + 1)] if rng.random() < 0.3 else letters)


TARGET = Target("run_keys", make, call, (ValueError,), oracle)
