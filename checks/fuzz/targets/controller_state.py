"""controller.msgpack of a checkpoint -> where every admitted prompt is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import numpy as np

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree
from megatron_opd.buffer.pass_rates import CurriculumState
from megatron_opd.buffer.spread import SpreadState
from megatron_opd.controller.snapshot import ControllerState, place
from megatron_opd.controller.snapshot_codec import decode_state, encode_state
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import NO_ROW, Prompt, Rollout, Sample, VersionSpan
from sglang_bridge.protocol import DrawCache

ASKED = ({"role": "user", "content": "1+1="},)


def rollout(uid: int, experts: bool = False) -> Rollout:
    """Three tokens, two cached ids each."""
    draws = DrawCache(
        offsets_T1=np.array([0, 2, 4, 6]),
        ids_N=np.array([4, 9] * 3, np.int32),
        path_T=np.array([0, 2, 4]),
        weight_N=np.array([1, 0] * 3, np.float32),
        sampler_logp_N=np.full(6, -0.5, np.float32),
    )
    prompt = Prompt(uid, "1+1=", np.array([5, 6], np.int32), "2", messages=ASKED)
    visited = np.arange(4 * 2 * 1, dtype=np.uint8).reshape(4, 2, 1) if experts else None
    gates = None if visited is None else np.full(visited.shape, 0.5, np.float32)
    ids, spans = np.full(3, 4, np.int32), (VersionSpan(1, 0, 2), VersionSpan(2, 2, 3))
    rollout = single_turn(prompt, ids, draws, spans, "stop", 0.0, 1.0, "s")
    return replace(rollout, experts_XLk=visited, gates_XLk=gates)


@cache
def corpus() -> list[bytes]:
    """Whole states."""
    line = [
        place(Sample(rollout(3), np.full(6, -0.7, np.float32), 1.0)),
        place(rollout(4, experts=True)),
        place(Prompt(5, "2+2=", np.array([7], np.int32))),
    ]
    spread = SpreadState(2, 1, {3: "alike", 4: "differ"})
    rates, seen = np.array([0.5, 1.0]), np.array([3, 1], np.int32)
    rated = CurriculumState(5, 2, rates, seen, [(4, 1, 1.0)])
    begun = (2, 2, 6, 2, {"length": 1}, 0, 6, line, [1], {2: 1})
    return [
        encode_state(ControllerState(*begun)),
        encode_state(ControllerState(*begun, spread, rated)),
        encode_state(ControllerState(2, 2, 4, 4, {}, 0, 4, [])),
    ]


def call(content: bytes) -> ControllerState:
    """Read it."""
    return decode_state(content)


def oracle(content: bytes, state: ControllerState) -> str | None:
    """Admitted = consumed + dropped + those in line, whose records hold what they promise."""
    counts = (state.updates, state.version, state.admitted, state.consumed, state.next_uid)
    if min(*counts, state.dropped_in_a_row, *state.dropped.values(), 0) < 0:
        return "counts below 0"
    if state.admitted != state.consumed + sum(state.dropped.values()) + len(state.line):
        return "prompts are lost or invented"
    uids: list[int] = []
    for member in state.line:
        found = [
            part for part in (member.prompt, member.rollout, member.sample) if part is not None
        ]
        if len(found) != 1:
            return "a place in the line that holds nothing, or two things"
        uids.append(member.uid)
        weights = (member.asked.reward_weight, member.asked.teacher_weight)
        if member.asked.row < NO_ROW or not all(np.isfinite(w) and w >= 0 for w in weights):
            return "weights that are none"
        fault = _rollout_fault(member.rollout or getattr(member.sample, "rollout", None))
        if fault is not None:
            return fault
        sample = member.sample
        if sample is not None and len(sample.teacher_logp_N) != sample.rollout.draws.num_ids:
            return "scores of other ids"
    if any(a >= b for a, b in pairwise([*uids, state.next_uid])) or min(uids, default=0) < 0:
        return "a line that is not in order"
    rated = state.curriculum
    if rated is None:
        return None
    asked = [member.asked.row for member in state.line if member.asked.row != NO_ROW]
    rows = [row for _, row, _ in rated.noted] + asked
    if len(rated.rate_R) != len(rated.seen_R) or not all(0 <= r < len(rated.rate_R) for r in rows):
        return "rates of other problems"
    if not all(0 <= rate <= 1 for rate in rated.rate_R.tolist()) or (rated.seen_R < 0).any():
        return "rates that are none"
    return None


def _rollout_fault(found: Rollout | None) -> str | None:
    if found is None:
        return None
    draws, tokens = found.draws, found.num_response_tokens
    offsets, ids = draws.offsets_T1.tolist(), draws.ids_N.tolist()
    if tokens < 1 or len(offsets) != tokens + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        return "rows that are not the response's"
    if any(a >= b for a, b in pairwise(offsets)) or len(draws.path_T) != tokens:
        return "rows that are empty, or no path"
    if not len(ids) == len(draws.weight_N) == len(draws.sampler_logp_N):
        return "columns of several lengths"
    rows = zip(pairwise(offsets), draws.path_T.tolist(), strict=True)
    if not all(start <= path < stop for (start, stop), path in rows):
        return "a path token of another row"
    ends = [0]
    for span in found.spans:
        if span.start != ends[-1] or span.stop <= span.start or span.version < 0:
            return "spans that do not cover the response"
        ends.append(span.stop)
    if ends[-1] != tokens:
        return "spans of another response"
    if found.experts_XLk is not None and len(found.experts_XLk) != found.num_tokens - 1:
        return "experts of other inputs"
    if found.gates_XLk is not None and (
        found.experts_XLk is None or found.gates_XLk.shape != found.experts_XLk.shape
    ):
        return "gate weights of other experts"
    return None


@cache
def _bytes() -> Any:
    return damaged_bytes(corpus(), most=3)


@cache
def _trees() -> Any:
    return damaged_tree([msgspec.msgpack.decode(content) for content in corpus()], most=2)


def damaged_array(rng: Random, node: Any) -> None:
    """Change one array of a decoded state in place: its length, or one item."""
    holders: list[tuple[Any, Any]] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        entries = each.items() if isinstance(each, dict) else enumerate(each)
        for key, value in entries:
            if isinstance(value, bytes):
                holders.append((each, key))
            elif isinstance(value, dict | list):
                waiting.append(value)
    if not holders:
        return
    holder, key = rng.choice(holders)
    data = bytearray(holder[key])
    at = rng.randrange(0, max(1, len(data)), 4)
    edit = rng.choice(("cut", "set", "add", "byte"))
    if edit == "cut":
        del data[at : at + rng.choice((4, 8))]
    elif edit == "set":
        data[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\1\0\0\0", b"\0\0\0\x80"))
    elif edit == "add":
        data += b"\0" * rng.choice((1, 4, 8))
    elif data:
        data[at] ^= 1 << rng.randrange(8)
    holder[key] = bytes(data)


def make(rng: Random) -> bytes:
    """A state, damaged in its bytes, its fields or its arrays."""
    kind = rng.choice(("bytes", "tree", "tree", "array", "array", "deep"))
    if kind == "bytes":
        return _bytes()(rng)
    if kind == "deep":
        return corpus()[0].replace(b"\x81\xa1a\x92", b"\x81\xa1a" + b"\x91" * 2000 + b"\x92")
    tree = msgspec.msgpack.decode(rng.choice(corpus()[:2]))
    if kind == "array":
        damaged_array(rng, tree)
        return msgspec.msgpack.encode(tree)
    try:
        return msgspec.msgpack.encode(_trees()(rng))
    except (OverflowError, UnicodeEncodeError, msgspec.MsgspecError):  # beyond msgpack
        return _bytes()(rng)


TARGET = Target("controller_state", make, call, (ValueError,), oracle, share=3)
