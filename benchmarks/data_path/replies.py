"""The bytes that a server of this commit answers, made by the code that makes them there."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from benchmarks.data_path.cases import DRAWS, EXPERTS, LAYERS, PROMPT, TOPK, Case, Rows
from sglang_bridge import wire
from sglang_bridge.server.draws import DrawRecord
from sglang_bridge.server.routing import ExpertRecord, Experts
from sglang_bridge.server.scoring import ScoreRecord

CONTENT_TYPE = "application/json"


def rollout_reply(case: Case, rows: Rows, rid: str) -> bytes:
    """Return the reply to the request for a completion called `rid`."""
    record = DrawRecord(num_atoms=0, num_draws=DRAWS)
    for name, column in rows.columns.items():
        record.columns[name] += column.tobytes()
    record.versions.append(("0", 0))
    payload: dict[str, Any] = {wire.DRAWS: record.payload()}
    if rows.experts_XLk is not None:
        experts = ExpertRecord(Experts(tuple(range(LAYERS)), EXPERTS), num_prompt=PROMPT)
        experts.append(case.tokens - 1, rows.experts_XLk)
        assert experts.topk == TOPK
        payload[wire.EXPERTS] = experts.payload()
    meta = {
        "id": rid,
        "finish_reason": {"type": "length", "length": case.tokens},
        "weight_version": "0",
        "num_retractions": 0,
        "prompt_tokens": PROMPT,
        "completion_tokens": case.tokens,
        "cached_tokens": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": case.tokens}],
        wire.PAYLOAD: [payload],
    }
    # four letters stand for what a token is as text
    body = {"text": "word" * case.tokens, "output_ids": rows.output_ids_T.tolist()}
    return orjson.dumps(body | {"meta_info": meta})


def score_reply(case: Case, rows: Rows, rid: str) -> bytes:
    """Return the reply to the request to score the rows' ids."""
    record = ScoreRecord(
        {
            wire.SCORE_START: PROMPT - 1,
            wire.SCORE_OFFSETS: wire.pack(np.arange(case.tokens + 1, dtype="<i4") * case.ids),
            wire.SCORE_IDS: wire.pack(rows.columns["ids_N"].astype("<i4")),
        }
    )
    record.logp_N[:] = rows.teacher_logp_N
    given = [[float(rows.teacher_logp_N[0]), int(token), None] for token in rows.output_ids_T]
    meta = {
        "id": rid,
        "finish_reason": {"type": "length", "length": 0},
        "weight_version": "0",
        "num_retractions": 0,
        "input_token_logprobs": given,
        "output_token_logprobs": [],
        "output_token_logprobs_length": 0,
        "prompt_tokens": PROMPT + case.tokens,
        "completion_tokens": 0,
        "cached_tokens": PROMPT,
        wire.PAYLOAD: [{wire.SCORES: record.payload()}],
    }
    return orjson.dumps({"text": "", "output_ids": [], "meta_info": meta})
