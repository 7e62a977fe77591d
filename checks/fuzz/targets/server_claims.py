"""Bodies of claims on a server -> what the server grants."""

from __future__ import annotations

import json
from random import Random

import msgspec

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree
from sglang_bridge.claims import Claim, ClaimStep
from sglang_bridge.server.owner import Claims, read_step

HOLDER = Claim("a" * 32, "b" * 32, "run /runs/a (pid 1 on host)", True)
OTHER = Claim("c" * 32, "d" * 32, "run /runs/c (pid 2 on host)", False)
STEPS = [ClaimStep(HOLDER, "renew"), ClaimStep(OTHER, "take"), ClaimStep(OTHER, "end")]
BODIES = [msgspec.json.encode(step) for step in STEPS]
TREES = damaged_tree([json.loads(body) for body in BODIES], most=2)
BYTES = damaged_bytes(BODIES, most=2)


def make(rng: Random) -> bytes:
    """A body after damage to its tree or its bytes."""
    return json.dumps(TREES(rng)).encode() if rng.random() < 0.5 else BYTES(rng)


def call(body: bytes) -> tuple[ClaimStep, str | None]:
    """As a server reads and answers it that HOLDER has claimed."""
    claims = Claims(lambda: 0.0)
    claims.refusal(HOLDER, "take")
    asked = read_step(body)
    return asked, claims.refusal(asked.claim, asked.step)


def oracle(body: bytes, answered: tuple[ClaimStep, str | None]) -> str | None:
    """What was sent is what is claimed, and only the holder's run gets it."""
    asked, refused = answered
    if json.loads(body) != msgspec.to_builtins(asked):
        return "another claim than was sent"
    granted = refused is None and asked.step != "end"
    return "a second run's claim" if granted and asked.claim.run != HOLDER.run else None


TARGET = Target("server_claims", make, call, (ValueError,), oracle)
