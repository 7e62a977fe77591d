"""Answers requests for work in the process that serves HTTP: as msgpack, and scores as JSON too.

SGLang's /generate would make base64 of every array and JSON of that, and text and log-probs that
nobody reads besides. Here only what a client parses goes out, in msgpack arrays as they are. JSON
is for clients that have no library of ours, and made here alone: schedulers see no difference.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from sglang_bridge import wire
from sglang_bridge.arrays import pack, unpack
from sglang_bridge.http import JSON_TYPE
from sglang_bridge.parse import parse_scores
from sglang_bridge.score_json import decode_score, encode_scores
from sglang_bridge.server import gates
from sglang_bridge.server.compat import hooks, startup
from sglang_bridge.server.text import to_text
from sglang_bridge.work_request import WorkRequest, decode_work, encode_score

# What of meta_info is answered.
ANSWERED = ("id", "finish_reason", "weight_versions", "cached_tokens", wire.PAYLOAD)

MOST_BYTES = 1 << 30
"""Largest request: of 131,072 tokens with 2,000 ids each to score, three times over."""

MOST_JSON_BYTES = 64 << 20
THIS = "this server"
"""What its own replies are said to come from, where they are wrong."""

_ENCODER = msgspec.msgpack.Encoder()


def before_serving(*args: Any, **kwargs: Any) -> None:
    """Adds our routes to a server that is about to serve. RuntimeError: a hook is not in place."""
    cuda = torch.cuda.is_available()
    hooks.require_hooks_in_place(hooks.wanted(cuda=cuda, gates=gates.kept()))
    add_work_routes()


def add_work_routes() -> None:
    """Lets this server answer wire.WORK_ROUTE and wire.SCORE_ROUTE."""

    def read_work(body: bytes) -> tuple[dict[str, Any], startup.Encode]:
        return generate_arguments(decode_work(body)), encode_answer

    startup.add_route(wire.WORK_ROUTE, wire.WORK_TYPE, read_work, MOST_BYTES)
    startup.add_route(wire.SCORE_ROUTE, JSON_TYPE, read_scores, MOST_JSON_BYTES)


def read_scores(body: bytes) -> tuple[dict[str, Any], startup.Encode]:
    """Returns what is asked of SGLang for scores as JSON, and what answers it."""
    asked = decode_score(body)
    arguments = generate_arguments(decode_work(encode_score(asked.rid, asked)))
    return arguments, lambda answer: encode_scores(asked, parse_scores(THIS, answer, asked))


def generate_arguments(asked: WorkRequest) -> dict[str, Any]:
    """Returns what SGLang's request is made of. Raises ValueError for ids that are none."""
    sampling = msgspec.structs.asdict(asked.sampling_params)
    custom: dict[str, Any] = {
        name: to_text(value) if isinstance(value, bytes) else value
        for name, value in sampling.pop("custom_params").items()
    }
    optional = {name: sampling.pop(name) for name in ("sampling_seed", "stop", "stop_token_ids")}
    sampling |= {name: value for name, value in optional.items() if value not in (None, [])}
    if custom:
        sampling["custom_params"] = custom | {wire.PACKED: True}
    return {
        "rid": asked.rid,
        "input_ids": unpack(asked.input_ids, "<i4").tolist(),
        "sampling_params": sampling | {"skip_special_tokens": False},
        "return_logprob": asked.return_logprob,
        "logprob_start_len": asked.logprob_start_len,
    }


def encode_answer(answer: dict[str, Any]) -> bytes:
    """Returns the reply's body. answer: what SGLang's /generate would answer as JSON."""
    meta = answer["meta_info"]
    ids = np.asarray(answer.get("output_ids") or [], dtype=np.int64)
    said = {name: meta[name] for name in ANSWERED if name in meta}
    return _ENCODER.encode({"output_ids": pack(ids), "meta_info": said})
