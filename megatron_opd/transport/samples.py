"""Encodes a scored sample as the bytes that a learner's rank reads; checks and decodes them.

A sample is encoded once, when it is scored, as four frames a sequence, since ranks differ in what
they read: tokens, the draw cache, routed experts and their weights (transport/parts.py).
Numbers are packed (sglang_bridge/arrays.py): ids in as few bytes as the largest needs, weights of
plain draws as counts, other weights and log-probs in two bytes, but for the path's log-probs, which
enter the importance ratios of whole responses. What a sample does not have (a teacher's log-probs
where none is asked, the sampler's of ids that the teacher chose) is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import msgspec
import numpy as np

from megatron_opd.batching.rank_batch import check_inputs, check_sample
from megatron_opd.config.supports import Support
from megatron_opd.records.runs import SampledRun, positions_of, runs_fault
from megatron_opd.records.sequences import by_sequence, joined
from megatron_opd.records.types import (
    ExpertArray,
    FloatArray,
    GateArray,
    IntArray,
    OffsetArray,
    Prompt,
    Rollout,
    Sample,
    SequenceInputs,
    VersionSpan,
)
from sglang_bridge.arrays import narrow_weights, pack, pack_logp, unpack
from sglang_bridge.columns import DrawColumns, arrays_of, dtypes
from sglang_bridge.errors import one_line
from sglang_bridge.protocol import DrawCache

Buffer = bytes | memoryview
Frames = Sequence[Buffer]
FRAMES = 4
"""Frames of a sequence: its tokens, its draw cache, its routed experts, their weights.

The last two are empty where it has none.
"""
GATE = np.dtype(np.float32)
RECORDED = dtypes(DrawColumns)


class EncodedInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds a sequence's tokens, packed, and says what its routing is.

    ids: given and sampled tokens. runs: (start, stop, turn) of the sampled ones, see
    records/runs.py. experts: layers, experts a token, bytes of an expert's index.
    """

    ids: bytes
    runs: list[tuple[int, int, int]]
    experts: tuple[int, int, int] | None = None


class EncodedCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds the columns of a sequence's draw cache, packed.

    path: of each token, which of its cached ids continued the path. versions: [version, stop].
    path_logp: the sampler's, as float32.
    """

    versions: list[tuple[int, int]]
    count: bytes
    path: bytes
    cached: bytes
    path_logp: bytes
    recorded: dict[str, bytes]
    teacher_logp: bytes | None = None


_ENCODER = msgspec.msgpack.Encoder()
_INPUTS = msgspec.msgpack.Decoder(EncodedInputs)
_CACHES = msgspec.msgpack.Decoder(EncodedCache)


def encode_sample(sample: Sample, num_draws: int = 0) -> Frames:
    """Return the frames of a sample, sequence by sequence. ValueError: it is malformed.

    num_draws: of the support, where its weights are counts.
    """
    check_sample(sample)
    return [frame for part in by_sequence(sample) for frame in _encode_sequence(part, num_draws)]


def _encode_sequence(sample: Sample, num_draws: int) -> Frames:
    rollout, draws = sample.rollout, sample.rollout.draws
    recorded = {name: pack(column) for name, column in arrays_of(draws, DrawColumns).items()}
    recorded["weight_N"] = narrow_weights(draws.weight_N, num_draws)
    if np.isnan(draws.sampler_logp_N).any():  # the teacher chose the ids: known on the path alone
        del recorded["sampler_logp_N"]
    else:
        recorded["sampler_logp_N"] = pack_logp(draws.sampler_logp_N)
    scores_N, experts, gates = sample.teacher_logp_N, rollout.experts_XLk, rollout.gates_XLk
    inputs = EncodedInputs(
        ids=pack(rollout.sequences[0]),
        runs=[(run.start, run.stop, run.turn) for run in rollout.runs],
        experts=None if experts is None else (*experts.shape[1:], experts.itemsize),
    )
    cache = EncodedCache(
        versions=[(span.version, span.stop) for span in rollout.spans],
        count=pack(np.diff(draws.offsets_T1)),
        path=pack(draws.path_T - draws.offsets_T1[:-1]),
        cached=pack(draws.ids_N),
        path_logp=pack(draws.sampler_logp_N[draws.path_T]),
        recorded=recorded,
        teacher_logp=None if np.isnan(scores_N).all() else pack_logp(scores_N),
    )
    routing = (b"" if each is None else raw(each) for each in (experts, gates))
    return encode_inputs(inputs), _ENCODER.encode(cache), *routing


@dataclass(frozen=True, slots=True)
class EncodedSample(Sample):
    """Holds a sample and its frames."""

    frames: Frames = ()

    @classmethod
    def of(cls, sample: Sample, num_draws: int) -> EncodedSample:
        """Encode a sample that is not encoded yet; see encode_sample."""
        if isinstance(sample, EncodedSample):
            return sample
        held = {field.name: getattr(sample, field.name) for field in fields(Sample)}
        return cls(**held, frames=encode_sample(sample, num_draws))


def counted_draws(support: Support) -> int:
    """Return how many draws a weight of 1 stands for, see encode_sample."""
    return 1 if support.only_path else support.num_draws


def frames_of(sample: Sample) -> Frames:
    """Return the frames that a sample was given, or new ones."""
    return sample.frames if isinstance(sample, EncodedSample) else encode_sample(sample)


def encode_inputs(inputs: EncodedInputs) -> bytes:
    """Return a sequence's first frame."""
    return _ENCODER.encode(inputs)


def read_inputs(uid: int, frame: Buffer) -> EncodedInputs:
    """Return what a sequence's first frame holds. ValueError: it is none. uid: names it."""
    try:
        return _INPUTS.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"sample {uid} cannot be read: {one_line(str(error))}") from None


def decode_inputs(uid: int, frames: Frames) -> SequenceInputs:
    """Return a sequence's tokens and routing. ValueError: these are no frames. uid: names it."""
    ids_S, runs, experts_XLk, gates_XLk = _decoded_inputs(uid, frames)
    return SequenceInputs(ids_S, positions_of(runs), experts_XLk, gates_XLk)


def _decoded_inputs(
    uid: int, frames: Frames
) -> tuple[IntArray, tuple[SampledRun, ...], ExpertArray | None, GateArray | None]:
    found = read_inputs(uid, frames[0])
    ids_S = _read(uid, "ids_S", found.ids, "<i4")
    runs = tuple(SampledRun(0, *run) for run in found.runs)
    fault = runs_fault([len(ids_S)], runs)
    if fault is not None:
        raise ValueError(f"sample {uid}: {fault}")
    experts = read_experts(uid, found.experts, frames[2])
    gates = read_gates(uid, experts, frames[3])
    check_inputs(uid, len(ids_S) - 1, experts, gates)
    return ids_S, runs, experts, gates


def decode_sample(uid: int, frames: Frames) -> Sample:
    """Return the sample, without what a learner does not read. ValueError: these are no frames.

    uid: what errors call it. Whether its columns fit each other is check_sample's.
    """
    if not frames or len(frames) % FRAMES:
        raise ValueError(f"sample {uid}: {len(frames)} frames, of {FRAMES} a sequence")
    own = (frames[first : first + FRAMES] for first in range(0, len(frames), FRAMES))
    return joined([_decoded_sequence(uid, each) for each in own])


def _decoded_sequence(uid: int, frames: Frames) -> Sample:
    ids_S, runs, experts_XLk, gates_XLk = _decoded_inputs(uid, frames)
    try:
        found = _CACHES.decode(frames[1])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"sample {uid}: no draw cache: {one_line(str(error))}") from None
    tokens = sum(run.num_tokens for run in runs)
    draws = _draws(uid, found, tokens)
    scores_N = np.full(draws.num_ids, np.nan, np.float32)
    if found.teacher_logp is not None:
        scores_N = _read(uid, "teacher_logp_N", found.teacher_logp, "<f4")
    rollout = Rollout(
        prompt=Prompt(uid, "", ids_S[: runs[0].start]),
        sequences=(ids_S,),
        runs=runs,
        draws=draws,
        spans=_spans(uid, found.versions, tokens),
        finish_reason="",
        started_s=0.0,
        finished_s=0.0,
        experts_XLk=experts_XLk,
        gates_XLk=gates_XLk,
    )
    return Sample(rollout, scores_N)


def _draws(uid: int, found: EncodedCache, tokens: int) -> DrawCache:
    """Return the draw cache of a sequence. ValueError: it is of another one, or none."""
    count_T = _read(uid, "count_T", found.count, "<i4")
    offsets_T1 = np.concatenate([[0], np.cumsum(count_T, dtype=np.int64)])
    cached = _read(uid, "ids_N", found.cached, "<i4")
    path_T = _read(uid, "path_T", found.path, "<i4")
    path_logp_T = _read(uid, "path_logp_T", found.path_logp, "<f4")
    for name, column in (("count_T", count_T), ("path_T", path_T), ("path_logp_T", path_logp_T)):
        if len(column) != tokens:
            raise ValueError(f"sample {uid}: {name} must have length {tokens}, got {len(column)}")
    if (count_T < 1).any() or offsets_T1[-1] != len(cached):
        raise ValueError(f"sample {uid}: count_T is not that of {len(cached)} cached ids")
    if (path_T < 0).any() or (path_T >= count_T).any():
        raise ValueError(f"sample {uid}: path_T must point into its own row")
    path_N = path_T + offsets_T1[:-1]
    names = {"sampler_logp_N", *found.recorded}
    if names != set(RECORDED):
        raise ValueError(f"sample {uid} must have the columns {', '.join(RECORDED)}")
    recorded = {
        name: _read(uid, name, raw, RECORDED[name].str) for name, raw in found.recorded.items()
    }
    recorded["sampler_logp_N"] = _sampler_logp(uid, recorded, path_N, path_logp_T, len(cached))
    return DrawCache(offsets_T1=offsets_T1, ids_N=cached, path_T=path_N, **recorded)


def _read(uid: int, name: str, raw: bytes, dtype: str) -> np.ndarray:
    try:
        return unpack(raw, dtype)
    except ValueError as error:
        raise ValueError(f"sample {uid}: column {name}: {error}") from None


def _sampler_logp(
    uid: int,
    recorded: Mapping[str, np.ndarray],
    path_T: OffsetArray,
    path_logp_T: FloatArray,
    num_ids: int,
) -> FloatArray:
    """Return the sampler's log-probs, the path's exactly; NaN where they are not known."""
    logp_N = recorded.get("sampler_logp_N")
    logp_N = np.full(num_ids, np.nan, np.float32) if logp_N is None else logp_N.copy()
    if len(logp_N) != num_ids:
        raise ValueError(
            f"sample {uid}: sampler_logp_N must have length {num_ids}, got {len(logp_N)}"
        )
    logp_N[path_T] = path_logp_T
    return logp_N


def _spans(uid: int, versions: Sequence[tuple[int, int]], tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of weight versions. ValueError: they do not cover its tokens."""
    edges = [0, *(stop for _, stop in versions)]
    if edges[-1] != tokens or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"sample {uid}: versions must cover {tokens} tokens, got ends {edges[1:]}")
    if not all(0 <= version < 2**31 for version, _ in versions):
        raise ValueError(f"sample {uid}: versions must be in 0..{2**31 - 1}")
    pairs = zip(versions, pairwise(edges), strict=True)
    return tuple(VersionSpan(version, start, stop) for (version, _), (start, stop) in pairs)


def read_experts(uid: int, kind: tuple[int, int, int] | None, packed: Buffer) -> ExpertArray | None:
    """Return the routed experts of this kind (EncodedInputs). ValueError: rows are incomplete."""
    if kind is None:
        if len(packed):
            raise ValueError(
                f"sample {uid}: {len(packed)} bytes of routed experts that it does not name"
            )
        return None
    layers, topk, itemsize = kind
    row = layers * topk * itemsize
    if itemsize not in (1, 2) or layers < 1 or topk < 1 or len(packed) % row:
        raise ValueError(
            f"sample {uid}: experts_XLk of {len(packed)} bytes cannot be of kind {kind}"
        )
    flat: ExpertArray = np.frombuffer(packed, dtype=np.uint8 if itemsize == 1 else np.uint16)
    return flat.reshape(-1, layers, topk)


def read_gates(uid: int, experts_XLk: ExpertArray | None, packed: Buffer) -> GateArray | None:
    """Return the weights of these experts. ValueError: not one for each."""
    if not len(packed):
        return None
    items = 0 if experts_XLk is None else experts_XLk.size
    if experts_XLk is None or len(packed) != items * GATE.itemsize:
        raise ValueError(
            f"sample {uid}: gates_XLk of {len(packed)} bytes cannot be of {items} experts"
        )
    return np.frombuffer(packed, dtype=GATE).reshape(experts_XLk.shape)


def raw(array: ExpertArray | GateArray) -> memoryview:
    """Return the bytes of an array, its own where they lie in order."""
    return np.ascontiguousarray(array).data.cast("B")
