"""What the ranks of a test world do about shares that their heads receive."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist

from megatron_opd.batching.shares import shares
from megatron_opd.config.estimator import Estimator
from megatron_opd.learner import reading
from megatron_opd.learner.reading import ShareReader
from megatron_opd.records.columns import RankBatch, RankInputs
from megatron_opd.records.types import Batch
from megatron_opd.transport.frames import from_frames, sizes_of, to_frames
from megatron_opd.transport.messages import Train
from megatron_opd.transport.samples import FRAMES
from sglang_bridge.arrays import pack
from tests.dist.jobs import make_learner, part

Raw = list[memoryview]


def _changed(place: int, **changes: Any) -> Callable[[Raw], Raw]:
    """The second sample's frame at `place` (of FRAMES) with other fields."""

    def change(frames: Raw) -> Raw:
        at = 1 + FRAMES + place
        tree = msgspec.msgpack.decode(frames[at]) | changes
        return [*frames[:at], memoryview(msgspec.msgpack.encode(tree)), *frames[at + 1 :]]

    return change


def _routed(layer: int, value: int) -> Callable[[Raw], Raw]:
    """The second sample with one expert in all rows of a layer."""

    def change(frames: Raw) -> Raw:
        at = 1 + FRAMES
        shape = msgspec.msgpack.decode(frames[at])["experts"][:2]
        experts = np.frombuffer(frames[at + 2], np.uint8).reshape(-1, *shape).copy()
        experts[:, layer] = value
        return [*frames[: at + 2], experts.reshape(-1).data, *frames[at + 3 :]]

    return change


def _raises(frames: Raw) -> Raw:
    raise ValueError("these samples do not fit")


# What the head of the last model copy has instead of its share; each is found by other ranks.
DAMAGES: dict[str, Callable[[Raw], Raw]] = {
    "cached ids": _changed(1, cached=pack(np.array([1, 2]))),
    "tokens": _changed(0, runs=[]),
    "an expert of the first layer": _routed(0, 255),
    "an expert of the last layer": _routed(-1, 255),
    "one expert twice": _routed(-1, 0),
    "the kind of experts": _changed(0, experts=(1, 9, 1)),
    "number of frames": lambda frames: frames[:-1],
    "no frames": lambda frames: [],
    "collected": _raises,
    "lacking": lambda frames: [],
}
COLLECTED = ("collected", "lacking")


def read(out: Path, *, model: Path, config: dict[str, Any], batch: Batch, damages: bool) -> None:
    """Read the batch, and before it every damaged one; what each rank said and got."""
    learner = make_learner(model, config)
    world = learner.world
    cut = shares(batch, learner.config, Estimator(), 1)[world.data_rank]
    whole = [memoryview(bytes(frame)) for frame in to_frames(cut)]
    damage = lambda frames: frames  # noqa: E731
    reader = ShareReader(learner, sampled=True, collect=lambda request, frames: damage(frames))
    dealt: list[int] = []
    original = reading.deal

    def counting(*arguments: Any) -> Any:
        found = original(*arguments)
        dealt[:] = [len(frame) for frame in found]
        return found

    reading.deal = counting
    request = Train(1, batch.update, batch.version, cut.plan, sizes=sizes_of(cut))
    said: dict[str, str] = {}
    for name in DAMAGES if damages else ():
        last = world.data_rank == world.parallel.dp - 1
        collects = name in COLLECTED
        damage = DAMAGES[name] if last and collects else lambda frames: frames
        frames = DAMAGES[name](whole) if last and not collects else whole
        parts = [("worker", "key")] if collects else []
        asked = msgspec.structs.replace(request, parts=parts)
        try:
            given = reader.read(asked, frames if world.is_head else [])
            said[name] = "nothing" if given is None else "something"
        except ValueError as error:
            said[name] = str(error)
    found = reader.read(request, whole if world.is_head else [])
    expected = part(from_frames(batch.update, batch.version, cut.plan, whole), learner)
    assert found is not None
    assert_same(found, expected)
    caches = dealt[2::FRAMES]
    row = {
        "stage": world.pp_rank,
        "cache": isinstance(found, RankBatch),
        "cache_bytes": sum(caches),
        "experts_bytes": sum(dealt[3::FRAMES]),
        "bytes": sum(dealt),
        "whole_bytes": sum(len(frame) for frame in whole),
        "whole_experts_bytes": sum(len(frame) for frame in whole[3::FRAMES]),
        "said": said,
    }
    rows: list[Any] = [None] * world.size
    dist.all_gather_object(rows, row)
    if world.rank == 0:
        (out / "result.json").write_text(json.dumps({"ranks": rows}))
    dist.destroy_process_group()


def assert_same(found: RankInputs, expected: RankInputs) -> None:
    """Bit for bit."""
    assert type(found) is type(expected)
    for field in fields(found):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if not isinstance(theirs, np.ndarray):
            assert ours == theirs, field.name
            continue
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), field.name
        assert ours.tobytes() == theirs.tobytes(), field.name
