"""Defines the request for work that a client sends to wire.WORK_ROUTE, as msgpack."""

from __future__ import annotations

import msgspec
import numpy as np

from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.errors import one_line
from sglang_bridge.protocol import RolloutRequest, ScoreRequest

Scalar = bool | int | float | bytes


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Says how to sample, in SGLang's words. custom_params: what the plugin reads (wire.py)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    sampling_seed: int | None = None
    stop_token_ids: list[int] = []
    stop: list[str] = []
    custom_params: dict[str, Scalar] = {}


class WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Asks for a completion, or for log-probs of a prompt from logprob_start_len on.

    input_ids: packed (arrays.py).
    """

    rid: str
    input_ids: bytes
    sampling_params: Sampling
    return_logprob: bool = False
    logprob_start_len: int = -1


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(WorkRequest)


def encode_rollout(request: RolloutRequest) -> bytes:
    """Encodes the request for a completion."""
    params: dict[str, Scalar] = {}
    if request.keeps_cache:
        params = {wire.NUM_ATOMS: request.num_atoms, wire.NUM_DRAWS: request.num_draws}
        wanted = {
            wire.THIN: request.thin,
            wire.WANTS_EXPERTS: request.experts,
            wire.WANTS_GATES: request.gates,
            wire.EXACT: request.exact,
        }
        params |= {name: True for name, value in wanted.items() if value}
    sampling = Sampling(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        sampling_seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        stop=list(request.stop),
        custom_params=params,
    )
    return _ENCODER.encode(WorkRequest(request.rid, pack(np.asarray(request.input_ids)), sampling))


def encode_score(rid: str, request: ScoreRequest) -> bytes:
    """Encodes the request for scores under the name `rid`."""
    params: dict[str, Scalar] = {
        wire.SCORE_RUNS: pack(np.array(request.runs)),
        wire.SCORE_LENGTHS: pack(np.diff(request.offsets_T1)),
        wire.SCORE_IDS: pack(request.ids_N),
        wire.SCORE_TEMPERATURE: request.temperature,
        wire.SCORE_ATOMS: request.num_atoms,
        wire.SCORE_DRAWS: request.num_draws,
    }
    if request.exact:
        params[wire.EXACT] = True
    sampling = Sampling(max_new_tokens=0, sampling_seed=request.seed, custom_params=params)
    ids = pack(np.asarray(request.input_ids))
    first = request.runs[0][0] - 1
    return _ENCODER.encode(
        WorkRequest(rid, ids, sampling, return_logprob=True, logprob_start_len=first)
    )


def decode_work(body: bytes) -> WorkRequest:
    """Decodes a request for work. Raises ValueError for anything else."""
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"not a request for work: {one_line(str(error))}") from None
