"""Encodes a rank's share of a batch as raw frames, one per column; decodes it without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_opd.columns import COLUMNS, RankBatch, RankPlan
from megatron_opd.config.schema import Config
from megatron_opd.types import ExpertArray
from sglang_bridge.columns import arrays_of, axis_of

MIN_FRAME_BYTES = 64 * 2**20
"""Smallest limit on a frame, for requests without a batch: the slices to digest of a model of a
million tensors."""
WIDEST_ITEM = 8


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
    """Return the columns' raw bytes, not copied; last the routed experts and their type."""
    frames = [memoryview(column).cast("B") for column in arrays_of(batch, RankBatch).values()]
    experts = batch.experts_XLk
    if experts is None:
        return [*frames, memoryview(b""), memoryview(b"")]
    kind = np.array([*experts.shape[1:], experts.itemsize], dtype=np.int64)
    return [*frames, kind.data.cast("B"), experts.data.cast("B")]


def from_frames(
    update: int, version: int, plan: RankPlan, frames: Sequence[memoryview]
) -> RankBatch:
    """Return the columns as views of the frames. ValueError: their number or lengths do not fit."""
    if len(frames) != len(COLUMNS) + 2:
        raise ValueError(f"a batch has {len(COLUMNS) + 2} columns, got {len(frames)} frames")
    columns = {
        name: np.frombuffer(frame, dtype=dtype)
        for (name, dtype), frame in zip(COLUMNS.items(), frames[:-2], strict=True)
    }
    experts = _read_experts(*frames[-2:])
    batch = RankBatch(update=update, version=version, plan=plan, experts_XLk=experts, **columns)
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
