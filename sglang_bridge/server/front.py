"""Answers requests for work as msgpack, in the process that serves HTTP.

SGLang's /generate would make base64 of every array and JSON of that, and text and log-probs that
nobody reads besides. Here only what a client parses goes out, arrays as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sglang_bridge import wire
from sglang_bridge.arrays import pack, unpack
from sglang_bridge.server.compat import startup
from sglang_bridge.server.text import to_text
from sglang_bridge.work_request import WorkRequest, decode_work

# What of meta_info is answered.
ANSWERED = ("id", "finish_reason", "weight_versions", "cached_tokens", wire.PAYLOAD)

MOST_BYTES = 1 << 30
"""Largest request: of 131,072 tokens with 2,000 ids each to score, three times over."""

_ENCODER = msgspec.msgpack.Encoder()


def add_work_route() -> None:
    """Lets this server answer wire.WORK_ROUTE."""
    startup.add_route(
        wire.WORK_ROUTE,
        wire.WORK_TYPE,
        lambda body: generate_arguments(decode_work(body)),
        encode_answer,
        MOST_BYTES,
    )


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
