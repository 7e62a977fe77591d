"""The bytes that a server of this commit answers, made by the code that makes them there."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.data_path.cases import DRAWS, EXPERTS, LAYERS, PROMPT, TOPK, Case, Rows
from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.server.draws import DrawRecord
from sglang_bridge.server.front import encode_answer
from sglang_bridge.server.routing import ExpertRecord, Experts
from sglang_bridge.server.scoring import ScoreRecord
from sglang_bridge.server.text import to_text

CONTENT_TYPE = wire.WORK_TYPE


def rollout_reply(case: Case, rows: Rows, rid: str, version: str = "0") -> bytes:
    """Return the reply to the request for a completion called `rid`, sampled by `version`."""
    record = DrawRecord(num_atoms=0, num_draws=DRAWS)
    for name, column in rows.columns.items():
        record.columns[name] += column.tobytes()
    record.versions.append((version, 0))
    payload: dict[str, Any] = {wire.DRAWS: record.payload()}
    if rows.experts_XLk is not None:
        experts = ExpertRecord(Experts(tuple(range(LAYERS)), EXPERTS), num_prompt=PROMPT)
        experts.append(case.tokens - 1, rows.experts_XLk)
        assert experts.topk == TOPK
        payload[wire.EXPERTS] = experts.payload()
    meta = {
        "id": rid,
        "finish_reason": {"type": "length", "length": case.tokens},
        "weight_versions": [{"version": version, "start": 0, "end": case.tokens}],
        "cached_tokens": 0,
        wire.PAYLOAD: [payload],
    }
    return encode_answer({"output_ids": rows.output_ids_T.tolist(), "meta_info": meta})


def score_reply(case: Case, rows: Rows, rid: str) -> bytes:
    """Return the reply to the request to score the rows' ids."""
    record = ScoreRecord(
        {
            wire.SCORE_RUNS: to_text(pack(np.array([PROMPT, PROMPT + case.tokens]))),
            wire.SCORE_LENGTHS: to_text(pack(np.full(case.tokens, case.ids))),
            wire.SCORE_IDS: to_text(pack(rows.columns["ids_N"])),
        }
    )
    record.logp_N[:] = rows.teacher_logp_N
    meta = {
        "id": rid,
        "finish_reason": {"type": "length", "length": 0},
        wire.PAYLOAD: [{wire.SCORES: record.payload()}],
    }
    return encode_answer({"output_ids": [], "meta_info": meta})
