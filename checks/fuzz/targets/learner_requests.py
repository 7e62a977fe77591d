"""Frames of a controller -> a request, and a batch that a learner's rank trains on."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, msgpack_bytes
from megatron_opd.batching.advantages import no_groups
from megatron_opd.batching.checks import check_batch
from megatron_opd.batching.shares import SampleSequence, Share
from megatron_opd.records.columns import RankBatch
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Prompt, Sample, VersionSpan
from megatron_opd.transport import messages as m
from megatron_opd.transport.frames import from_frames, to_frames
from megatron_opd.transport.samples import FRAMES
from sglang_bridge import arrays
from sglang_bridge.protocol import DrawCache, WeightPiece

VOCAB_SIZE, NUM_EXPERTS = 64, 8


def call(frames: list[bytes]) -> Any:
    """As a learner's rank reads a message."""
    request = m.decode_request(frames[0])
    if not isinstance(request, m.Train):
        return request, None
    views = [memoryview(frame) for frame in frames[1:]]
    batch = from_frames(request.update, request.version, request.plan, views)
    check_batch(batch, vocab_size=VOCAB_SIZE, num_experts=NUM_EXPERTS, sampled=True)
    return request, batch


def oracle(frames: list[bytes], found: tuple[Any, RankBatch | None]) -> str | None:
    """The columns are samples of this model, by the docstrings of RankBatch and DrawCache."""
    request, batch = found
    if m.decode_request(m.encode(request)) != request:
        return "a message is another one when it is sent on"
    if batch is None:
        return None
    lengths, responses = batch.length_B.tolist(), batch.response_B.tolist()
    counts, path = batch.count_T.tolist(), batch.path_T.tolist()
    ids_N, ids = batch.ids_N.tolist(), batch.ids_S.tolist()
    if sorted(i for a in batch.plan for b in a for i in b) != list(range(len(lengths))):
        return "a plan of other samples"
    if not lengths or len({len(lengths), len(responses), len(batch.advantage_B)}) != 1:
        return "columns of several lengths"
    if min(*lengths, *responses, *counts) < 1:
        return "a sample without tokens"
    if sum(lengths) != len(ids) or not sum(responses) == len(counts) == len(batch.position_T):
        return "tokens that are not the samples'"
    if len(path) != len(counts) or len(batch.version_T) != len(counts) or sum(counts) != len(ids_N):
        return "rows that are not the tokens'"
    columns = (batch.weight_N, batch.sampler_logp_N, batch.teacher_logp_N)
    if any(len(column) != len(ids_N) for column in columns):
        return "cached columns of several lengths"
    if not all(0 <= i < VOCAB_SIZE for i in ids + ids_N):
        return "an id beyond the vocabulary"
    if not all(0 <= v <= batch.version for v in batch.version_T.tolist()):
        return "weights of the future"
    return _rows_fault(batch, responses, counts, path) or _experts_fault(batch)


def _rows_fault(
    batch: RankBatch, responses: list[int], counts: list[int], path: list[int]
) -> str | None:
    at = token = start = 0
    weights, logp = batch.weight_N.tolist(), batch.sampler_logp_N.tolist()
    for length, response in zip(batch.length_B.tolist(), responses, strict=True):
        places = batch.position_T[token : token + response].tolist()
        if sorted(set(places)) != places or not 1 <= places[0] <= places[-1] == length - 1:
            return "sampled tokens that are not in their sequence"
        own = [int(batch.ids_S[at + place]) for place in places]
        at += length
        for i in own:
            stop = start + counts[token]
            row = batch.ids_N[start:stop].tolist()
            if not start <= path[token] < stop:
                return "a path token of another row"
            if batch.ids_N[path[token]] != i:
                return "a path token that is not the response's"
            if sorted(set(row)) != row:
                return "the ids of a row do not rise"
            if not all(math.isfinite(w) and w >= 0 for w in weights[start:stop]):
                return "weights that are none"
            if not all(math.isfinite(x) for x in logp[start:stop]):
                return "log-probs that are none"
            start, token = stop, token + 1
    return None


def _experts_fault(batch: RankBatch) -> str | None:
    found = batch.experts_XLk
    if found is None:
        return None
    if len(found) != len(batch.ids_S) - len(batch.length_B) or int(found.max()) >= NUM_EXPERTS:
        return "experts of other inputs"
    gates = batch.gates_XLk
    if gates is not None and not (gates.shape == found.shape and (gates >= 0).all()):
        return "gate weights that are none"
    return None


def sample(
    rng: Random, uid: int, routed: bool, weighed: bool, *, several_turns: bool = True
) -> Sample:
    """A valid sample of 1 to 3 sampled tokens, some with given ones between."""
    prompt, response = rng.randint(1, 3), rng.randint(1, 3)
    rows = [sorted(rng.sample(range(VOCAB_SIZE), rng.randint(1, 3))) for _ in range(response)]
    columns = [rng.randrange(len(row)) for row in rows]
    count_T = np.array([len(row) for row in rows])
    offsets_T1 = np.concatenate([[0], np.cumsum(count_T)])
    draws = DrawCache(
        offsets_T1=offsets_T1,
        ids_N=np.array([i for row in rows for i in row], np.int32),
        path_T=offsets_T1[:-1] + columns,
        weight_N=np.repeat(1 / count_T, count_T).astype(np.float32),
        sampler_logp_N=np.repeat(-np.log(count_T + 1), count_T).astype(np.float32),
    )
    gaps = [rng.choice((0, 0, 0, 2)) * several_turns for _ in range(response - 1)]
    inputs = prompt + response + sum(gaps) - 1
    experts = np.array([rng.randrange(NUM_EXPERTS) for _ in range(4 * inputs)], np.uint8)
    rollout = single_turn(
        Prompt(uid, "", np.array([rng.randrange(VOCAB_SIZE) for _ in range(prompt)], np.int32)),
        draws.ids_N[draws.path_T],
        draws,
        (VersionSpan(rng.randint(0, 4), 0, response),),
        "stop",
    )
    (ids_S,), runs = rollout.sequences, [*rollout.runs]
    for turn, gap in enumerate(gaps, 1):
        if gap:  # the last run goes on behind given tokens
            last = runs.pop()
            at = last.stop - (response - turn)
            ids_S = np.insert(ids_S, at, np.full(gap, 1, np.int32))
            before = SampledRun(0, last.start, at, turn - 1)
            runs += [before, SampledRun(0, at + gap, last.stop + gap, turn)]
    rollout = replace(
        rollout,
        sequences=(ids_S,),
        runs=tuple(runs),
        experts_XLk=experts.reshape(inputs, 2, 2) if routed else None,
        gates_XLk=np.full((inputs, 2, 2), 0.5, np.float32) if routed and weighed else None,
    )
    return Sample(rollout, np.full(len(draws.ids_N), -2.0, np.float32))


def share(rng: Random) -> Share:
    """A valid share of 1 to 3 samples."""
    count = rng.randint(1, 3)
    routed, weighed = rng.random() < 0.4, rng.random() < 0.5
    samples = tuple(sample(rng, uid, routed, weighed) for uid in range(count))
    sequences = tuple(map(SampleSequence, samples))
    return Share(3, 4, [[list(range(count))]], sequences, no_groups(count))


INTEGERS = (-1, 0, 1, 2, 3, 63, 64, 2**31 - 1, -(2**31))
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e30, 5.0)


def damaged_array(rng: Random, packed: bytes) -> bytes:
    """One number of a packed array, its length or its order, or its bytes."""
    kind = "<f4" if packed[:2] in (b"f4", b"q2", b"h1", b"w2") else "<i4"
    values = arrays.unpack(packed, kind).copy()
    edit = rng.choice(("set", "set", "set", "cut", "double", "swap", "bytes"))
    if edit == "bytes" or not len(values):
        return damaged_bytes([packed], most=2)(rng)
    at = rng.randrange(len(values))
    if edit == "set":
        near = (values[at] + 1, values[at] - 1) if kind == "<f4" else ()
        values[at] = rng.choice((*(FLOATS if kind == "<f4" else INTEGERS), *near))
    elif edit == "cut":
        values = np.delete(values, at)
    elif edit == "double":
        values = np.insert(values, at, values[at])
    else:
        values = np.roll(values, 1)
    return arrays.pack(values)


def damaged_head(rng: Random, head: bytes) -> bytes:
    """A sample's tokens or its draw cache: one array damaged, or a node of the tree."""
    tree = msgspec.msgpack.decode(head)
    if rng.random() < 0.3:
        return msgpack_bytes(damaged_tree([tree], most=2)(rng))
    holder = tree["recorded"] if "recorded" in tree and rng.random() < 0.4 else tree
    name = rng.choice([key for key, value in holder.items() if isinstance(value, bytes)])
    holder[name] = damaged_array(rng, holder[name])
    return msgspec.msgpack.encode(tree)


OTHERS: tuple[Any, ...] = (
    *(m.MoveWeights(1, b"\x80"), m.Stop(3), m.LoadState(4, "/x"), m.RankRefused("no")),
    m.SaveState(1, "/x", 3, True),
    *(m.ExportHf(1, "/x", None, "{{ x }}"), m.RankWelcome("/run.lock", "aa", True)),
    m.DigestPieces(1, [WeightPiece(0, "model.norm.weight", 0, 0, 4, "float32", "aa")]),
)
OTHER_BYTES = damaged_bytes([m.encode(other) for other in OTHERS], most=2)
OTHER_TREES = damaged_tree([msgspec.msgpack.decode(m.encode(other)) for other in OTHERS], most=2)


def make(rng: Random) -> list[bytes]:
    """A request and its frames."""
    kind = rng.random()
    if kind < 0.15:
        return [OTHER_BYTES(rng)]
    if kind < 0.3:
        try:
            return [msgspec.msgpack.encode(OTHER_TREES(rng))]
        except (OverflowError, UnicodeEncodeError, msgspec.MsgspecError):  # beyond msgpack
            return [OTHER_BYTES(rng)]
    rows = share(rng)
    header = m.encode(m.Train(1, rows.update, rows.version, rows.plan))
    frames = [header, *(bytes(frame) for frame in to_frames(rows))]
    edit = rng.choice(("column", "column", "column", "groups", "header", "frame", "order"))
    if edit == "column":
        hit = rng.sample(range(len(rows.sequences)), rng.randint(1, len(rows.sequences)))
        for place in (2 + FRAMES * number + rng.randrange(2) for number in hit):
            frames[place] = damaged_head(rng, frames[place])
    elif edit == "groups":
        frames[1] = msgpack_bytes(damaged_tree([msgspec.msgpack.decode(frames[1])])(rng))
    elif edit == "header":
        frames[0] = damaged_bytes([header], most=2)(rng)
    elif edit == "frame":
        place = rng.randrange(1, len(frames))
        frames[place] = damaged_bytes([frames[place]], most=2)(rng)
    else:
        place, other = rng.randrange(1, len(frames)), rng.randrange(1, len(frames))
        frames[place], frames[other] = frames[other], frames[place]
        if rng.random() < 0.3:
            del frames[place]
    return frames


TARGET = Target("learner_requests", make, call, (ValueError,), oracle, share=4)
