"""Encodes a rank's share of a batch as raw frames, one per column; decodes it without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_opd.batching.joining import joined
from megatron_opd.batching.rank_batch import one_sample
from megatron_opd.batching.shares import Share
from megatron_opd.columns import COLUMNS, DoubleArray, GroupColumns, RankBatch, RankPlan
from megatron_opd.config.schema import Config
from megatron_opd.transport.messages import Train
from megatron_opd.types import ExpertArray, GateArray, sample_here
from sglang_bridge.columns import arrays_of, axis_of, dtypes

MIN_FRAME_BYTES = 64 * 2**20
"""Smallest limit on a frame, for requests without a batch: the slices to digest of a model of a
million tensors."""
WIDEST_ITEM = 8
GATE = np.dtype(np.float32)
EXPERT_FRAMES = ("kind", "experts", "gates")
"""What follows the columns; empty where samples have none."""
ROWS = dtypes(GroupColumns)
"""Columns of what samples of a group decide together: a row for each sample."""


def largest_frame_bytes(config: Config, vocab_size: int, experts_per_input: int) -> int:
    """Return the size of the largest column that a batch of this configuration can have.

    experts_per_input: layers with experts times experts a token.
    """
    support, rollout = config.estimator.support, config.rollout
    ids = support.num_atoms(vocab_size) + support.num_draws + 1
    responses = config.buffer.batch_size * rollout.max_new_tokens
    inputs = responses + config.buffer.batch_size * config.data.max_prompt_tokens
    items = max(responses * ids, inputs * max(1, experts_per_input))
    return max(MIN_FRAME_BYTES, items * WIDEST_ITEM)


def to_frames(batch: RankBatch) -> list[memoryview]:
    """Return the columns' raw bytes, not copied; last the routed experts' type, they, and gates."""
    frames = [memoryview(column).cast("B") for column in arrays_of(batch, RankBatch).values()]
    experts = batch.experts_XLk
    if experts is None:
        return [*frames, *(memoryview(b"") for _ in EXPERT_FRAMES)]
    kind = np.array([*experts.shape[1:], experts.itemsize], dtype=np.int64)
    gates = memoryview(b"") if batch.gates_XLk is None else batch.gates_XLk.data.cast("B")
    return [*frames, kind.data.cast("B"), experts.data.cast("B"), gates]


SAMPLE_FRAMES = len(COLUMNS) + len(EXPERT_FRAMES)


def share_frames(share: Share, elsewhere: Sequence[bool]) -> list[memoryview]:
    """Return the frames of a share of which some samples come from elsewhere.

    First the rows of their groups, then the columns of each sample that is here, one by one.
    """
    found = [column.data.cast("B") for column in _rows(share.groups).values()]
    for sample, away in zip(share.samples, elsewhere, strict=True):
        if not away:
            found += to_frames(one_sample(sample_here(sample)))
    return found


def from_share_frames(
    request: Train, frames: Sequence[memoryview], taken: Mapping[str, Sequence[memoryview]]
) -> RankBatch:
    """Return the columns of what share_frames gave, and of samples taken from elsewhere by key.

    ValueError: they do not fit.
    """
    rows, rest = frames[: len(ROWS)], list(frames[len(ROWS) :])
    if len(rows) < len(ROWS):
        raise ValueError(f"a share has {len(ROWS)} columns of groups, got {len(rows)} frames")
    columns = {
        name: np.frombuffer(frame, dtype=dtype)
        for (name, dtype), frame in zip(ROWS.items(), rows, strict=True)
    }
    samples: list[RankBatch] = []
    for address, key in request.parts:
        own = taken[key] if address else rest[:SAMPLE_FRAMES]
        if not address:
            del rest[:SAMPLE_FRAMES]
        samples.append(from_frames(0, 0, [[[0]]], own))
    if rest:
        raise ValueError(f"a share has {len(rest)} frames too many")
    return joined(request.update, request.version, request.plan, samples, GroupColumns(**columns))


def _rows(groups: GroupColumns[DoubleArray]) -> dict[str, DoubleArray]:
    columns = arrays_of(groups, GroupColumns)
    return {name: np.ascontiguousarray(columns[name], dtype) for name, dtype in ROWS.items()}


def from_frames(
    update: int, version: int, plan: RankPlan, frames: Sequence[memoryview]
) -> RankBatch:
    """Return the columns as views of the frames. ValueError: their number or lengths do not fit."""
    needed = len(COLUMNS) + len(EXPERT_FRAMES)
    if len(frames) != needed:
        raise ValueError(f"a batch has {needed} columns, got {len(frames)} frames")
    kind, raw_experts, raw_gates = frames[len(COLUMNS) :]
    columns = {
        name: np.frombuffer(frame, dtype=dtype)
        for (name, dtype), frame in zip(COLUMNS.items(), frames[: len(COLUMNS)], strict=True)
    }
    experts = _read_experts(kind, raw_experts)
    gates = _read_gates(raw_gates, experts)
    batch = RankBatch(
        update=update, version=version, plan=plan, experts_XLk=experts, gates_XLk=gates, **columns
    )
    lengths = batch.lengths()
    for name, column in columns.items():
        needed = lengths[axis_of(name)]
        if len(column) != needed:
            raise ValueError(f"column {name} must have length {needed}, got {len(column)}")
    inputs = len(batch.ids_S) - len(batch.prompt_B)
    if experts is not None and len(experts) != inputs:
        raise ValueError(f"column experts_XLk must have length {inputs}, got {len(experts)}")
    return batch


def _read_experts(kind: memoryview, raw: memoryview) -> ExpertArray | None:
    """Read the two frames of experts that to_frames wrote. ValueError: rows are incomplete."""
    if not len(kind):
        return None
    numbers = np.frombuffer(kind, dtype=np.int64).tolist()
    layers, topk, itemsize = numbers if len(numbers) == 3 else (0, 0, 0)
    dtypes: dict[int, Any] = {1: np.uint8, 2: np.uint16}
    row = layers * topk * itemsize
    if itemsize not in dtypes or layers < 1 or topk < 1 or len(raw) % row:
        raise ValueError(f"column experts_XLk of {len(raw)} bytes cannot be of kind {numbers}")
    experts: ExpertArray = np.frombuffer(raw, dtype=dtypes[itemsize])
    return experts.reshape(len(raw) // row, layers, topk)


def _read_gates(raw: memoryview, experts_XLk: ExpertArray | None) -> GateArray | None:
    """Read the weights of these experts. ValueError: not one for each."""
    if not len(raw):
        return None
    items = 0 if experts_XLk is None else experts_XLk.size
    if experts_XLk is None or len(raw) != items * GATE.itemsize:
        raise ValueError(f"column gates_XLk of {len(raw)} bytes cannot be of {items} experts")
    return np.frombuffer(raw, dtype=GATE).reshape(experts_XLk.shape)
