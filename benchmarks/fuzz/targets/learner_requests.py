"""Frames of a controller -> a request, and a batch that a learner's rank trains on."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec
import numpy as np

from benchmarks.fuzz.engine import Target
from benchmarks.fuzz.mutations import damaged_bytes, damaged_tree
from megatron_opd.batching.advantages import no_groups
from megatron_opd.batching.checks import check_batch
from megatron_opd.columns import COLUMNS, GroupColumns, RankBatch
from megatron_opd.transport import messages as m
from megatron_opd.transport.frames import from_frames, to_frames
from sglang_bridge.columns import arrays_of
from sglang_bridge.protocol import WeightPiece

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
    prompts, responses = batch.prompt_B.tolist(), batch.response_B.tolist()
    counts, path = batch.count_T.tolist(), batch.path_T.tolist()
    ids_N, ids = batch.ids_N.tolist(), batch.ids_S.tolist()
    if sorted(i for a in batch.plan for b in a for i in b) != list(range(len(prompts))):
        return "a plan of other samples"
    if not prompts or len({len(prompts), len(responses), len(batch.advantage_B)}) != 1:
        return "columns of several lengths"
    if min(*prompts, *responses, *counts) < 1:
        return "a sample without tokens"
    if sum(prompts) + sum(responses) != len(ids) or sum(responses) != len(counts):
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
    for prompt, response in zip(batch.prompt_B.tolist(), responses, strict=True):
        own = batch.ids_S[at + prompt : at + prompt + response].tolist()
        at += prompt + response
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
    if len(found) != len(batch.ids_S) - len(batch.prompt_B) or int(found.max()) >= NUM_EXPERTS:
        return "experts of other inputs"
    gates = batch.gates_XLk
    if gates is not None and not (gates.shape == found.shape and (gates >= 0).all()):
        return "gate weights that are none"
    return None


def batch(rng: Random) -> RankBatch:
    """A valid share of 1 to 3 samples."""
    samples = rng.randint(1, 3)
    prompts = [rng.randint(1, 3) for _ in range(samples)]
    responses = [rng.randint(1, 3) for _ in range(samples)]
    ids, rows, path = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        ids += [rng.randrange(VOCAB_SIZE) for _ in range(prompt)]
        for _ in range(response):
            row = sorted(rng.sample(range(VOCAB_SIZE), rng.randint(1, 3)))
            chosen = rng.randrange(len(row))
            path.append(sum(map(len, rows)) + chosen)
            rows.append(row)
            ids.append(row[chosen])
    flat = [i for row in rows for i in row]
    groups = no_groups(samples)
    inputs = len(ids) - samples
    experts = np.array([rng.randrange(NUM_EXPERTS) for _ in range(4 * inputs)], np.uint8)
    routed = experts.reshape(inputs, 2, 2) if rng.random() < 0.4 else None
    gates = np.full((inputs, 2, 2), 0.5, np.float32) if rng.random() < 0.5 else None
    columns: dict[str, Any] = {
        "ids_S": ids,
        "prompt_B": prompts,
        "response_B": responses,
        "count_T": [len(row) for row in rows],
        "path_T": path,
        "version_T": [rng.randint(0, 4) for _ in rows],
        "ids_N": flat,
        "weight_N": [1 / len(row) for row in rows for _ in row],
        "sampler_logp_N": [-math.log(len(row) + 1) for row in rows for _ in row],
        "teacher_logp_N": [-2.0] * len(flat),
    }
    arrays = {name: np.array(values, COLUMNS[name]) for name, values in columns.items()}
    return RankBatch(
        update=3,
        version=4,
        plan=[[list(range(samples))]],
        **arrays,
        **arrays_of(groups, GroupColumns),
        experts_XLk=routed,
        gates_XLk=None if routed is None else gates,
    )


INTEGERS = (-1, 0, 1, 2, 3, 63, 64, 2**31 - 1, -(2**31))
LARGE = (2**63 - 1, -(2**63), 2**62, 2**32)
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e30, 5.0)


def damage_column(rng: Random, name: str, frame: bytes) -> bytes:
    """One number of a column, two that wrap around in a sum, or its length."""
    values = np.frombuffer(frame, COLUMNS[name]).copy()
    if not len(values):
        return b"\0"
    edit, at = rng.choice(("set", "set", "set", "wrap", "cut", "double", "swap")), 0
    at = rng.randrange(len(values))
    if edit == "set":
        kind = FLOATS if values.dtype.kind == "f" else INTEGERS
        kind = (*kind, *LARGE) if values.dtype == np.int64 else kind
        values[at] = rng.choice((*kind, values[at] + 1, values[at] - 1))
    elif edit == "wrap" and values.dtype == np.int64:
        for place in rng.choices(range(len(values)), k=2):
            values[place] ^= np.int64(-(2**63)) if rng.random() < 0.5 else np.int64(2**62)
    elif edit == "wrap" and len(values) > 2:
        values[:3] = values[:3][::-1]
    elif edit == "cut":
        values = np.delete(values, at)
    elif edit == "double":
        values = np.insert(values, at, values[at])
    else:
        values = np.roll(values, 1)
    return values.tobytes()


def wrapped(rng: Random, frames: list[bytes]) -> None:
    """Lengths whose sum is right modulo 2**64 alone."""
    name = rng.choice(("prompt_B", "response_B", "count_T"))
    place = list(COLUMNS).index(name) + 1
    lengths = np.frombuffer(frames[place], np.int64).tolist()
    if len(lengths) < 3:
        return
    most = 2**63 - 1
    lengths[:3] = [most, most, sum(lengths[:3]) + 2]
    if lengths[2] > 0:
        frames[place] = np.array(lengths, np.int64).tobytes()


OTHERS: tuple[Any, ...] = (
    *(m.MoveWeights(1, b"\x80"), m.Stop(3), m.LoadState(4, "/x"), m.Refused("no")),
    m.SaveState(1, "/x", 3, True),
    *(m.ExportHf(1, "/x", None), m.Welcome("/run.lock", "aa", True)),
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
    rows = batch(rng)
    header = m.encode(m.Train(1, rows.update, rows.version, rows.plan))
    frames = [header, *(bytes(frame) for frame in to_frames(rows))]
    edit = rng.choice(("column", "column", "column", "wrapped", "header", "frame", "order"))
    if edit == "column":
        for _ in range(rng.randint(1, 2)):
            place, name = rng.choice(list(enumerate(COLUMNS, 1)))
            if len(frames[place]) % COLUMNS[name].itemsize == 0:
                frames[place] = damage_column(rng, name, frames[place])
    elif edit == "wrapped":
        wrapped(rng, frames)
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
