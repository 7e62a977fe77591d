"""Bodies of requests for work -> what a server's schedulers are asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import numpy as np

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, msgpack_bytes
from sglang_bridge import arrays, wire
from sglang_bridge.protocol import MAX_ATOMS, MAX_DRAWS, RolloutRequest, ScoreRequest
from sglang_bridge.server.front import generate_arguments
from sglang_bridge.server.scoring import ScoreRecord, runs_of
from sglang_bridge.server.validate import check_draw_params, check_score_params
from sglang_bridge.work_request import decode_work, encode_rollout, encode_score

VOCAB_SIZE = 64
PROMPT = np.array([1, 2, 3], np.int32)


@dataclass(frozen=True)
class Asked:
    """What SGLang's validation hands to the plugin."""

    sampling_params: dict[str, Any]
    custom_logit_processor: Any = None


def call(body: bytes) -> dict[str, Any]:
    """As the HTTP process and the plugin's part of SGLang's validation read it."""
    arguments = generate_arguments(decode_work(body))
    sampling = arguments["sampling_params"]
    params = sampling.get("custom_params", {})
    if wire.NUM_DRAWS in params:
        check_draw_params(params, Asked(sampling), VOCAB_SIZE)
    if wire.SCORE_IDS in params:
        check_score_params(params, len(arguments["input_ids"]), VOCAB_SIZE)
    return arguments


def oracle(body: bytes, arguments: dict[str, Any]) -> str | None:
    """The ids are those that travelled, and what is kept and scored lies in them."""
    given = msgspec.msgpack.decode(body)
    ids = arguments["input_ids"]
    if arrays.unpack(given["input_ids"], "<i4").tolist() != ids:
        return "other ids than were sent"
    if not isinstance(arguments["rid"], str) or arguments["rid"] != given["rid"]:
        return "another name than was sent"
    params = arguments["sampling_params"].get("custom_params", {})
    kinds = ((wire.NUM_DRAWS, wire.NUM_ATOMS, wire.NUM_DRAWS),)
    kinds += ((wire.SCORE_IDS, wire.SCORE_ATOMS, wire.SCORE_DRAWS),)
    for sign, atoms, draws in kinds:
        if sign not in params:
            continue  # nobody reads them
        for name, most in ((atoms, min(MAX_ATOMS, VOCAB_SIZE)), (draws, MAX_DRAWS)):
            count = params.get(name, 0)
            if not isinstance(count, int) or not 0 <= count <= most:
                return "more ids a token than there may be"
    if wire.SCORE_IDS not in params:
        return None
    try:
        record, runs = ScoreRecord(params), runs_of(params)
    except (ValueError, TypeError, ArithmeticError, KeyError):
        return "ids to score that cannot be read"
    if not 0 < record.temperature < math.inf:
        return "a temperature that is none"
    if not all(0 <= edge <= len(ids) for run in runs for edge in run):
        return "rows that are not of the input"
    places = [place for start, stop in runs for place in range(start, stop)]
    if not places or not 0 < places[0] <= places[-1] == len(ids) - 1:
        return "rows that are not of the input"
    if sorted(set(places)) != places or any(start >= stop for start, stop in runs):
        return "runs that do not rise"
    lengths = np.diff(record.offsets_T1)
    if len(lengths) != len(places) or (lengths < 0).any() or lengths.sum() != len(record.ids_N):
        return "rows that are not those of the ids"
    if len(record.ids_N) and not 0 <= record.ids_N.min() <= record.ids_N.max() < VOCAB_SIZE:
        return "ids to score beyond the vocabulary"
    return None


PLAIN = RolloutRequest(rid="r", input_ids=PROMPT, max_new_tokens=6, temperature=0.7)
SCORE = ScoreRequest(
    rid="s",
    input_ids=np.array([1, 2, 3, 4, 5, 6, 7], np.int32),
    runs=((2, 4), (6, 7)),
    offsets_T1=np.array([0, 2, 3, 4]),
    ids_N=np.array([7, 8, 9, 63], np.int32),
    num_atoms=2,
    num_draws=3,
)
BODIES = [
    encode_rollout(PLAIN),
    encode_rollout(
        RolloutRequest(
            rid="r-2",
            input_ids=PROMPT,
            max_new_tokens=9,
            num_atoms=2,
            num_draws=4,
            thin=True,
            experts=True,
            gates=True,
            seed=7,
            stop=("x",),
            stop_token_ids=(5,),
            exact=True,
        )
    ),
    encode_score("s-1.", SCORE),
]
DECODED = [msgspec.msgpack.decode(body) for body in BODIES]
TREES, BYTES = damaged_tree(DECODED, most=2), damaged_bytes(BODIES, most=2)
ODD = (-1, 0, 1, 2, 3, 4, 63, 64, 129, 2**31 - 1, -(2**31))


def odd_numbers(rng: Random) -> bytes:
    """A request with another number in an array or among its figures."""
    tree = msgspec.msgpack.decode(rng.choice((BODIES[1], BODIES[2], BODIES[2])))
    params = tree["sampling_params"]["custom_params"]
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(list(params))
        if isinstance(params[name], bytes):
            values = arrays.unpack(params[name], "<i4").copy()
            if len(values):
                values[rng.randrange(len(values))] = rng.choice(ODD)
            cut = rng.choice((values, values, values[:-1], np.append(values, values[-1:])))
            params[name] = arrays.pack(cut)
        else:
            params[name] = rng.choice((*ODD, math.nan, math.inf, 0.5, -1.0, True))
    return msgspec.msgpack.encode(tree)


def other_runs(rng: Random) -> bytes:
    """A request with other runs, and as many rows as they have ids; many cannot be."""
    tree = msgspec.msgpack.decode(BODIES[2])
    params = tree["sampling_params"]["custom_params"]
    edges = [rng.randint(0, len(SCORE.input_ids)) for _ in range(2 * rng.randint(1, 3))]
    if rng.random() < 0.5:
        edges.sort()
    edges[-1] = rng.choice((len(SCORE.input_ids), edges[-1]))
    rows = sum(stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True))
    lengths = [len(SCORE.ids_N), *[0] * (rows - 1)]
    params[wire.SCORE_RUNS] = arrays.pack(np.array(edges))
    params[wire.SCORE_LENGTHS] = arrays.pack(np.array(lengths))
    return msgspec.msgpack.encode(tree)


def make(rng: Random) -> bytes:
    """A body after damage to its arrays, its runs, its tree or its bytes."""
    kind = rng.random()
    if kind < 0.1:
        return other_runs(rng)
    if kind < 0.4:
        return odd_numbers(rng)
    return msgpack_bytes(TREES(rng)) if kind < 0.8 else BYTES(rng)


TARGET = Target("work_requests", make, call, (ValueError,), oracle, share=2)
