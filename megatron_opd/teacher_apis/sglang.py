"""Asks a stock SGLang, without the plugin, through its own /generate (checked against 0.5.23).

Log-probs of a prompt are SGLang's at temperature 1, whatever the sampling parameters say. Entry i
of `input_token_logprobs` is the id at logprob_start_len + i with its log-prob after all before it;
the first one has none. `top_logprobs_num` and `token_ids_logprob` are of a whole request.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from megatron_opd.teacher_apis.foreign import (
    NUMBER_BYTES,
    PAIR_BYTES,
    ForeignClient,
    other_ids,
    plain_ids,
)
from megatron_opd.teacher_apis.replies import (
    answered,
    field,
    ids_of,
    listed,
    pairs_of,
    path_of,
    reason_of,
    require_ours,
    top_table,
)
from sglang_bridge.errors import RequestAborted
from sglang_bridge.protocol import (
    BASE_BYTES,
    FloatArray,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
)
from sglang_bridge.tables import join, require

GENERATE = "/generate"
MOST_OTHERS = 256
"""Ids besides the sampled ones that a request may score, each of them in every row: those of the
guard's short passages. Those of a run would be thousands in every row."""


class SglangClient(ForeignClient):
    """Talks to a stock SGLang; see ForeignClient."""

    api = "sglang"

    def __init__(
        self, url: str, *, timeout_s: float, api_key: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(url, timeout_s=timeout_s, api_key=api_key, name=name)
        self._tries = itertools.count()

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Return log q of the request's ids and of the likeliest ones, in one try.

        ServerRefused: draws, another temperature, or more other ids than MOST_OTHERS.
        """
        self._require_servable(GENERATE, request)
        others = np.unique(np.asarray(request.ids_N)[other_ids(request)])
        if len(others) > MOST_OTHERS:
            raise self._refused(
                GENERATE,
                f"scores the sampled ids, and at most {MOST_OTHERS} others in a request, got "
                f"{len(others)}",
            )
        first = request.runs[0][0] - 1
        body: dict[str, Any] = {
            "rid": f"{request.rid}-{next(self._tries)}.",
            "input_ids": plain_ids(request.input_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": first,
            "return_prompt_token_ids": True,
        }
        if request.num_atoms:
            body["top_logprobs_num"] = request.num_atoms
        if len(others):
            body["token_ids_logprob"] = others.tolist()
        length = len(request.input_ids)
        rows = (length - first) * (1 + request.num_atoms + len(others))
        size = BASE_BYTES + length * NUMBER_BYTES + rows * PAIR_BYTES
        reply = await self._asked(GENERATE, body, size, length)
        return parse_scores(self.url, reply, request, others)

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Return one answer with the log-probs of its ids, and of the likeliest ones, in one try.

        ServerRefused: draws.
        """
        if request.num_draws or request.experts:
            raise self._refused(GENERATE, "samples without draws or experts")
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop_token_ids": list(request.stop_token_ids),
        }
        if request.stop:
            sampling["stop"] = list(request.stop)
        body: dict[str, Any] = {
            "rid": request.rid,
            "input_ids": plain_ids(request.input_ids),
            "sampling_params": sampling,
            "return_logprob": request.keeps_cache,
            "return_prompt_token_ids": True,
        }
        if request.num_atoms:
            body["top_logprobs_num"] = request.num_atoms
        pairs = request.max_new_tokens * (2 + request.num_atoms)
        size = BASE_BYTES + len(request.input_ids) * NUMBER_BYTES + pairs * PAIR_BYTES
        tokens = len(request.input_ids) + request.max_new_tokens
        reply = await self._asked(GENERATE, body, size, tokens)
        return parse_answer(self.url, reply, request)


def parse_scores(url: str, reply: Any, request: ScoreRequest, others: np.ndarray) -> ScoreReply:
    """Return the scores of a reply of /generate. others: ids that were asked for in each row.

    BadReply: it is not of these ids at these positions.
    """
    meta = field(url, reply, "meta_info", dict)
    _require_whole(url, meta)
    echoed = ids_of(url, "prompt_token_ids", field(url, reply, "prompt_token_ids", list))
    require_ours(url, "prompt_token_ids", echoed, request.input_ids)
    first = request.runs[0][0] - 1
    count = len(request.input_ids) - first
    name = "input_token_logprobs"
    entries = listed(url, meta, name, count)
    logp_X, ids_X = pairs_of(url, name, entries[1:])
    require_ours(url, f"the ids of {name}", ids_X, echoed[first + 1 :])
    place_T = request.position_T - first
    path_T, path_logp_T = path_of(request), logp_X[place_T]
    row_N = np.repeat(np.arange(request.num_tokens), np.diff(request.offsets_T1))
    logp_N = path_logp_T[row_N]
    if len(others):
        name = "input_token_ids_logprobs"
        table_TO = _others(url, listed(url, meta, name, count), place_T + 1, others)
        other_N = other_ids(request)
        column_N = np.searchsorted(others, np.asarray(request.ids_N)[other_N])
        logp_N[other_N] = table_TO[row_N[other_N], column_N]
    if not request.selects:
        return ScoreReply(logp_N)
    name = "input_top_logprobs"
    table = listed(url, meta, name, count)
    rows = [
        pairs_of(url, name, field(url, {name: table[place]}, name, list))
        for place in (place_T + 1).tolist()
    ]
    fits = all(0 < len(ids_K) <= request.num_atoms for _, ids_K in rows)
    require(url, fits, f"a row of {name} must hold 1 to {request.num_atoms} ids")
    return ScoreReply(logp_N, join(request, logp_N, top_table(url, rows, path_T, path_logp_T)))


def _others(url: str, table: list[Any], place_T: np.ndarray, others: np.ndarray) -> FloatArray:
    """Return float32 [T, O]: the log-probs of the ids that were asked for, in every row."""
    name = "input_token_ids_logprobs"
    found: list[FloatArray] = []
    for place in place_T.tolist():
        logp_O, ids_O = pairs_of(url, name, field(url, {name: table[place]}, name, list))
        require_ours(url, f"the ids of {name}", ids_O, others)
        found.append(logp_O)
    return np.stack(found)


def parse_answer(url: str, reply: Any, request: RolloutRequest) -> RolloutReply:
    """Return the answer in a reply of /generate. BadReply, or RequestAborted."""
    meta = field(url, reply, "meta_info", dict)
    _require_whole(url, meta)
    echoed = ids_of(url, "prompt_token_ids", field(url, reply, "prompt_token_ids", list))
    require_ours(url, "prompt_token_ids", echoed, request.input_ids)
    reason = field(url, meta, "finish_reason", dict)
    kind = reason_of(url, reason.get("type"), reason.get("matched"), request.stop)
    ids_T = ids_of(url, "output_ids", field(url, reply, "output_ids", list))
    if not request.keeps_cache:
        return answered(url, request, ids_T, kind, None)
    name = "output_token_logprobs"
    logp_T, named_T = pairs_of(url, name, listed(url, meta, name, len(ids_T)))
    require_ours(url, f"the ids of {name}", named_T, ids_T)
    if not request.num_atoms:
        return answered(url, request, ids_T, kind, (logp_T, None))
    name = "output_top_logprobs"
    rows = [
        pairs_of(url, name, field(url, {name: row}, name, list))
        for row in listed(url, meta, name, len(ids_T))
    ]
    return answered(url, request, ids_T, kind, (logp_T, rows))


def _require_whole(url: str, meta: dict[str, Any]) -> None:
    """Raise RequestAborted for a reply to a request that the server gave up."""
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise RequestAborted(f"{url}: a request was aborted: {reason.get('message')}")
