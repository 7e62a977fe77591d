"""Asks a server of OpenAI's /v1/completions that returns log-probs of its prompt.

Two forms of a reply are read, and the first score tells which one a server has:

    vLLM     choices[0].prompt_logprobs: a row for every prompt id, keyed by ids in decimal digits,
             with the k likeliest ones and the id itself (`prompt_logprobs: k`)
    SGLang   choices[0].logprobs.token_logprobs: a number for every prompt id (`echo: true`). Its
             likeliest ids are keyed by their texts, which several ids may share: they are not read

Both tell the ids of the prompt with `return_token_ids: true`, which must be ours. Log-probs of a
prompt are those at temperature 1. The vLLM form follows its documentation (its OpenAI server, 0.10
to 0.11) and is tested on replies that were written by it; the other one on SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from megatron_opd.teacher_apis.foreign import (
    NUMBER_BYTES,
    PAIR_BYTES,
    ForeignClient,
    WrittenText,
    other_ids,
    plain_ids,
)
from megatron_opd.teacher_apis.replies import (
    answered,
    field,
    ids_of,
    listed,
    logps_of,
    path_of,
    reason_of,
    require_ours,
    top_table,
)
from sglang_bridge.errors import BadReply, one_line
from sglang_bridge.protocol import (
    BASE_BYTES,
    FloatArray,
    IntArray,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
)
from sglang_bridge.tables import join, require

COMPLETIONS = "/v1/completions"
BY_ID = "prompt_logprobs"
MAX_DIGITS = 10


class OpenaiClient(ForeignClient):
    """Talks to a server of OpenAI's /v1/completions; see ForeignClient."""

    api = "openai"
    _by_id: bool | None = None
    """Whether the server has vLLM's form; None: it was not asked yet."""

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Return log q of the sampled ids, and of the likeliest ones, in one try.

        ServerRefused: draws, other ids, or another temperature. BadReply: also where likeliest ids
        are asked for and the server keys them by their texts.
        """
        self._require_servable(COMPLETIONS, request)
        if other_ids(request).any():
            raise self._refused(COMPLETIONS, "scores the sampled ids and the likeliest ones alone")
        body = self._body(plain_ids(request.input_ids), 1, 1.0)
        if self._by_id is not True:
            body |= {"echo": True, "logprobs": 1}
        if self._by_id is not False:
            body[BY_ID] = request.num_atoms
        length = len(request.input_ids)
        rows = length * (2 + request.num_atoms)
        size = BASE_BYTES + length * NUMBER_BYTES + 2 * rows * PAIR_BYTES
        reply = await self._asked(COMPLETIONS, body, size, length + 1)
        found = parse_scores(self.url, reply, request)
        self._by_id = has_ids(reply)
        return found

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Return one answer with the log-probs of its ids, in one try; likeliest ids are left out.

        ServerRefused: draws.
        """
        return parse_answer(self.url, await self._completed(request), request)

    async def write(
        self, request: RolloutRequest, messages: Sequence[dict[str, Any]]
    ) -> RolloutReply | WrittenText:
        """Return one answer, in one try: its text alone where the server shows no ids."""
        reply = await self._completed(request)
        choice = _choice(self.url, reply)
        if choice.get("token_ids") is not None:
            return parse_answer(self.url, reply, request)
        text = field(self.url, choice, "text", str)
        matched = choice.get("stop_reason", choice.get("matched_stop"))
        reason = reason_of(self.url, choice.get("finish_reason"), matched, request.stop)
        return WrittenText(text, reason, self.url)

    async def _completed(self, request: RolloutRequest) -> Any:
        if request.num_draws or request.experts:
            raise self._refused(COMPLETIONS, "samples without draws or experts")
        ids = plain_ids(request.input_ids)
        body = self._body(ids, request.max_new_tokens, request.temperature)
        body["top_p"] = request.top_p
        if request.stop_token_ids:
            body["stop_token_ids"] = list(request.stop_token_ids)
        if request.stop:
            body["stop"] = list(request.stop)
        if request.seed is not None:
            body["seed"] = request.seed % 2**31
        if request.keeps_cache:
            body["logprobs"] = 1
        pairs = 4 * request.max_new_tokens
        size = BASE_BYTES + len(ids) * NUMBER_BYTES + pairs * PAIR_BYTES
        return await self._asked(COMPLETIONS, body, size, len(ids) + request.max_new_tokens)

    def _body(self, ids: list[int], max_tokens: int, temperature: float) -> dict[str, Any]:
        return {
            "model": self.name or "",
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "return_token_ids": True,
        }


def parse_scores(url: str, reply: Any, request: ScoreRequest) -> ScoreReply:
    """Return the scores of a reply of /v1/completions.

    BadReply: it is not of these ids at these positions, or lacks the likeliest ids by id.
    """
    choice = _choice(url, reply)
    _require_prompt(url, choice, request.input_ids)
    path_T, place_T = path_of(request), request.position_T + 1
    row_N = np.repeat(np.arange(request.num_tokens), np.diff(request.offsets_T1))
    if choice.get(BY_ID) is None:
        if request.selects:
            raise BadReply(
                f"{url}: the reply has no {BY_ID}, which keys the likeliest ids by id: this "
                "server scores sampled ids alone; set support.type: path, or teacher.api: sglang "
                "for an SGLang"
            )
        logp_T = _echoed(url, choice, len(request.input_ids))[place_T - 1]
        return ScoreReply(logp_T[row_N])
    table = listed(url, choice, BY_ID, len(request.input_ids))
    rows = [_row(url, table[place]) for place in place_T.tolist()]
    logp_T = np.array([_of(url, row, int(i)) for row, i in zip(rows, path_T, strict=True)])
    logp_T = logp_T.astype(np.float32)
    if not request.selects:
        return ScoreReply(logp_T[row_N])
    likeliest = [_likeliest(url, row, request.num_atoms) for row in rows]
    top = top_table(url, likeliest, path_T, logp_T)
    return ScoreReply(logp_T[row_N], join(request, logp_T[row_N], top))


def parse_answer(url: str, reply: Any, request: RolloutRequest) -> RolloutReply:
    """Return the answer in a reply of /v1/completions. BadReply: it is none to this prompt."""
    choice = _choice(url, reply)
    _require_prompt(url, choice, request.input_ids)
    matched = choice.get("stop_reason", choice.get("matched_stop"))
    kind = reason_of(url, choice.get("finish_reason"), matched, request.stop)
    ids_T = ids_of(url, "token_ids", field(url, choice, "token_ids", list))
    if not request.keeps_cache:
        return answered(url, request, ids_T, kind, None)
    listing = field(url, choice, "logprobs", dict)
    values = listed(url, listing, "token_logprobs", len(ids_T))
    return answered(url, request, ids_T, kind, (logps_of(url, "token_logprobs", values), None))


def has_ids(reply: Any) -> bool:
    """Tell whether a reply that was read has vLLM's form."""
    return reply["choices"][0].get(BY_ID) is not None


def _choice(url: str, reply: Any) -> dict[str, Any]:
    choice = listed(url, reply, "choices", 1)[0]
    require(url, type(choice) is dict, "the choice is no object")
    return choice


def _require_prompt(url: str, choice: dict[str, Any], ours: Any) -> None:
    name = "prompt_token_ids"
    if choice.get(name) is None:
        raise BadReply(
            f"{url}: the reply has no {name}, so that nothing shows that it is of the ids that "
            "were sent; it needs a server that knows return_token_ids (vLLM from 0.10.2 on, SGLang)"
        )
    require_ours(url, name, ids_of(url, name, field(url, choice, name, list)), ours)


def _echoed(url: str, choice: dict[str, Any], length: int) -> FloatArray:
    """Return float32 [S - 1]: the log-probs of a prompt's ids but the first, which has none."""
    name = "token_logprobs"
    values = field(url, field(url, choice, "logprobs", dict), name, list)
    fits = length <= len(values) <= length + 1  # with the one token that had to be sampled
    require(url, fits, f"{name} holds {len(values)} values for {length} ids and one more")
    require(url, values[0] is None, f"the first of {name} must be null: nothing is before it")
    return logps_of(url, name, values[1:length])


def _row(url: str, row: Any) -> tuple[FloatArray, IntArray]:
    """Return log-probs and ids of `{"ID": {"logprob": ..}, ..}`."""
    require(url, type(row) is dict and len(row) > 0, f"a row of {BY_ID} is no object")
    items = cast(dict[str, Any], row)
    digits = all(k.isascii() and k.isdigit() and len(k) <= MAX_DIGITS for k in items)
    require(url, digits, f"a key of {BY_ID} is no id")
    values = [field(url, items, key, dict).get("logprob") for key in items]
    return logps_of(url, BY_ID, values), ids_of(url, BY_ID, [int(key) for key in items])


def _of(url: str, row: tuple[FloatArray, IntArray], token: int) -> float:
    """Return the log-prob of an id that must be in the row."""
    logp_K, ids_K = row
    found = logp_K[ids_K == token]
    if len(found) != 1:
        shown = one_line(str(ids_K[:8].tolist()), 60)
        raise BadReply(
            f"{url}: a row of {BY_ID} must hold the id {token} of its place once, got {shown}: "
            "it is of another position"
        )
    return float(found[0])


def _likeliest(
    url: str, row: tuple[FloatArray, IntArray], count: int
) -> tuple[FloatArray, IntArray]:
    """Return the `count` likeliest ids of a row that holds the sampled one besides."""
    logp_K, ids_K = row
    most = count + 1
    require(url, len(ids_K) <= most, f"a row of {BY_ID} must hold at most {most} ids")
    order_K = np.argsort(-logp_K, kind="stable")[:count]
    return logp_K[order_K], ids_K[order_K]
