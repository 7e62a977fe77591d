"""Encodes a rank's share of a batch as frames, those of its sequences end to end; decodes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from megatron_opd.batching.rank_batch import rank_batch, rank_inputs
from megatron_opd.batching.shares import Share
from megatron_opd.config.mixture_rules import most_draws
from megatron_opd.config.schema import Config
from megatron_opd.records.columns import DoubleArray, GroupColumns, RankBatch, RankInputs, RankPlan
from megatron_opd.records.types import HeldSample
from megatron_opd.transport.samples import (
    FRAMES,
    Buffer,
    Frames,
    decode_inputs,
    decode_sample,
    frames_of,
)
from sglang_bridge.columns import arrays_of, dtypes
from sglang_bridge.errors import one_line

MIN_FRAME_BYTES = 64 * 2**20
"""Smallest limit on a frame, for requests without a batch: the slices to digest of a model of a
million tensors."""
# A cached id whose numbers are all sent as they are, and what a token has besides.
ID_BYTES, TOKEN_BYTES = 16, 32
WIDEST_ROUTE = 4

BufferT = TypeVar("BufferT", bound=Buffer)

_GROUPS = dtypes(GroupColumns)
_TURNS = "advantage_R"
_DECODER = msgspec.msgpack.Decoder(dict[str, bytes])


def largest_frame_bytes(config: Config, vocab_size: int, experts_per_input: int) -> int:
    """Return the size of the largest frame that a batch of this configuration can have.

    experts_per_input: layers with experts times experts a token.
    """
    support, rollout = config.estimator.support, config.rollout
    ids = support.num_atoms(vocab_size) + most_draws(config) + 1
    sampled, inputs = rollout.max_new_tokens, rollout.max_new_tokens + config.data.max_prompt_tokens
    if config.environment is not None:
        sampled = inputs = config.environment.max_tokens
    columns = sampled * ids * ID_BYTES + inputs * TOKEN_BYTES
    return max(MIN_FRAME_BYTES, columns, inputs * experts_per_input * WIDEST_ROUTE)


def to_frames(share: Share) -> list[bytes | memoryview]:
    """Return the columns of the groups and the turns, and the frames of every sequence.

    Those that data workers hold are left out.
    """
    groups = {
        name: np.ascontiguousarray(column, dtype=_GROUPS[name]).tobytes()
        for name, column in arrays_of(share.groups, GroupColumns).items()
    }
    if share.advantage_R is not None:
        groups[_TURNS] = np.ascontiguousarray(share.advantage_R, dtype=np.float64).tobytes()
    own: list[Buffer] = []
    for each in share.sequences:
        if not isinstance(each.sample, HeldSample):
            own += of_sequence(frames_of(each.sample), each.sequence)
    return [msgspec.msgpack.encode(groups), *own]


def of_sequence(frames: Sequence[BufferT], sequence: int) -> Sequence[BufferT]:
    """Return the frames of one sequence of a sample, or none where it has fewer sequences."""
    return frames[sequence * FRAMES : (sequence + 1) * FRAMES]


def with_samples(
    frames: Sequence[memoryview],
    parts: Sequence[tuple[str, str, int]],
    taken: Mapping[str, Sequence[memoryview]],
) -> list[memoryview]:
    """Return the frames of a whole share.

    frames: what to_frames gave. parts: (address, key, sequence) of every sequence; the first two
    are empty for one that is in `frames`. taken: the frames of the other samples, by key.
    ValueError: they do not fit.
    """
    whole, here = list(frames[:1]), list(frames[1:])
    for address, key, sequence in parts:
        own = of_sequence(taken.get(key, ()), sequence) if address else here[:FRAMES]
        if len(own) != FRAMES:
            raise ValueError(f"a sequence has {FRAMES} frames, got {len(own)} of {key or 'ours'}")
        whole += own
        if not address:
            del here[:FRAMES]
    if here or not frames:
        raise ValueError(f"a share of {len(parts)} sequences cannot have {len(frames)} frames here")
    return whole


def sizes_of(share: Share) -> list[tuple[int, int, int]]:
    """Return (tokens, sampled tokens, cached ids) of every sequence."""
    sizes = [each.size for each in share.sequences]
    return [(size.tokens, size.sampled, size.ids) for size in sizes]


def check_sizes(batch: RankBatch, sizes: Sequence[tuple[int, int, int]]) -> None:
    """Raise ValueError unless the sequences are as large as the controller was told (sizes_of).

    It has planned the micro-batches with these sizes.
    """
    if len(sizes) != len(batch.length_B):
        raise ValueError(f"{len(sizes)} sizes for {len(batch.length_B)} sequences")
    starts_B = np.cumsum(batch.response_B) - batch.response_B
    ids_B = np.add.reduceat(batch.count_T, starts_B).tolist()
    found = zip(batch.length_B.tolist(), batch.response_B.tolist(), ids_B, strict=True)
    for number, (size, told) in enumerate(zip(found, sizes, strict=True)):
        if size != tuple(told):
            raise ValueError(
                f"sequence {number} has tokens, sampled tokens and cached ids {size}, the "
                f"controller was told {tuple(told)}"
            )


def from_frames(update: int, version: int, plan: RankPlan, frames: Sequence[Buffer]) -> RankBatch:
    """Return the columns of a share. ValueError: their number or lengths do not fit."""
    samples = [decode_sample(number, own) for number, own in enumerate(_by_sequence(frames))]
    groups, advantage_R = _groups(frames[0], len(samples))
    return rank_batch(update, version, samples, plan, groups, advantage_R)


def inputs_from_frames(
    update: int, version: int, plan: RankPlan, frames: Sequence[Buffer]
) -> RankInputs:
    """Return a share without its draw caches, which are not read. ValueError, as from_frames."""
    inputs = [decode_inputs(number, own) for number, own in enumerate(_by_sequence(frames))]
    return rank_inputs(update, version, inputs, plan, _groups(frames[0], len(inputs))[0])


def _by_sequence(frames: Sequence[Buffer]) -> list[Frames]:
    """Return the frames of each sequence of a share."""
    if len(frames) < 1 + FRAMES or (len(frames) - 1) % FRAMES:
        raise ValueError(f"a share has 1 frame and {FRAMES} a sequence, got {len(frames)}")
    return [frames[i : i + FRAMES] for i in range(1, len(frames), FRAMES)]


def _groups(frame: Buffer, samples: int) -> tuple[GroupColumns[DoubleArray], DoubleArray | None]:
    """Return the columns of the groups, and the advantages of the turns, if there are any."""
    try:
        found = _DECODER.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"columns of groups cannot be read: {one_line(str(error))}") from None
    turns = found.pop(_TURNS, None)
    if found.keys() != _GROUPS.keys():
        raise ValueError(f"columns of groups must be {', '.join(_GROUPS)}, got {len(found)}")
    for name, dtype in _GROUPS.items():
        if len(found[name]) != samples * dtype.itemsize:
            raise ValueError(
                f"column {name} must have length {samples}, got {len(found[name])} bytes"
            )
    columns = {name: np.frombuffer(raw, dtype=_GROUPS[name]) for name, raw in found.items()}
    return GroupColumns(**columns), None if turns is None else _turns(turns)


def _turns(raw: bytes) -> DoubleArray:
    if len(raw) % np.dtype(np.float64).itemsize:
        raise ValueError(f"{_TURNS} must hold numbers of 8 bytes, got {len(raw)} bytes")
    return np.frombuffer(raw, dtype=np.float64)
