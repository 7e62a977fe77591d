"""Questions of a learner's rank -> the samples that a data worker gives it."""

from __future__ import annotations

import logging
from functools import cache
from random import Random
from typing import Any

import msgspec

from checks.fuzz.engine import Target
from checks.fuzz.mutations import BYTES, TEXTS, damaged_bytes, damaged_tree, msgpack_bytes
from checks.fuzz.quiet import quiet
from checks.fuzz.targets.learner_requests import sample
from megatron_opd.data_workers.data_server import DataServer
from megatron_opd.data_workers.store import WorkerStore
from megatron_opd.records.types import Rollout, Sample
from megatron_opd.transport.samples import FRAMES, EncodedSample
from sglang_bridge.refusals import Refusals

HELD = {f"r-{n}": sample(Random(n), n, routed=n == 2, weighed=True) for n in range(1, 5)}
RANK = b"rank"
Given = list[bytes]


class Refused(ValueError):
    """The worker counted it and gave nothing."""


class Wire:
    """Stands for the socket."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    def send(self, route: bytes, frames: list[Any]) -> None:
        """Note what is given."""
        self.sent.append([route, *map(bytes, frames)])


@cache
def store() -> WorkerStore:
    """What the worker holds: a response, and samples that are scored, encoded or not."""
    made = WorkerStore(lambda endpoint: None, None, draws=0)  # type: ignore[arg-type,return-value]
    kept: dict[str, Rollout | Sample] = dict(HELD)
    kept["r-1"] = HELD["r-1"].rollout
    kept["r-2"] = EncodedSample.of(HELD["r-2"], 0)
    made._held = kept
    return made


def call(given: Given) -> list[list[bytes]]:
    """Ask it. Returns the messages that it gives."""
    server: Any = object.__new__(DataServer)  # its socket is learner_socket's kind
    server._router, server._frames = Wire(), store().frames
    server._refusals = Refusals(logging.getLogger("megatron_opd.data_workers.data_server"), "")
    with quiet("megatron_opd.data_workers.data_server"):
        server._serve_share(RANK, given)
    if not server._refusals.count:
        return server._router.sent
    assert not server._router.sent, "a question that was refused was answered"
    raise Refused("counted")


def oracle(given: Given, sent: list[list[bytes]]) -> str | None:
    """Every key that was asked for is answered once, in order, with its own sample or none."""
    if len(given) != 1:
        return "a question of several frames"
    keys = msgspec.msgpack.decode(given[0])
    if not isinstance(keys, list) or any(not isinstance(key, str) for key in keys):
        return "a question that is no list of keys"
    if len(set(keys)) < len(keys):
        return "a sample that is given twice"
    if [frames[:2] for frames in sent] != [[RANK, key.encode()] for key in keys]:
        return "other keys than were asked for, or for another rank"
    for key, (_, _, *frames) in zip(keys, sent, strict=True):
        if frames != (_frames(key) if key in HELD else []):
            return "another sample"
    return None


@cache
def _frames(key: str) -> list[bytes]:
    frames = [bytes(frame) for frame in store().frames(key)]
    assert len(frames) == FRAMES
    return frames


WHOLE = msgspec.msgpack.encode(list(HELD))
TREES = damaged_tree([list(HELD), ["r-1"], ["r-2", "r-9"]], most=3)
DAMAGED = damaged_bytes([WHOLE, msgspec.msgpack.encode(["r-1"])], most=2)


def make(rng: Random) -> Given:
    """Some keys, held or not, after damage; now and then more frames, or none."""
    kind = rng.random()
    if kind < 0.3:
        frame = DAMAGED(rng)
    elif kind < 0.8:
        frame = msgpack_bytes(TREES(rng))
    else:
        keys = rng.choices((*HELD, "r-9", rng.choice(TEXTS[3:])), k=rng.randint(0, 6))
        frame = msgpack_bytes(keys)
    return rng.choice(([frame], [frame], [frame], [frame], [frame, rng.choice(BYTES)], []))


TARGET = Target("worker_questions", make, call, (Refused,), oracle)
