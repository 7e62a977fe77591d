"""Answers as servers of somebody else do, for a bigram model: an id follows from the one before.

`sglang` writes what SGLang 0.5.23's /generate answers, `sglang_openai` what its /v1/completions
does: both were written down from a server that ran. `vllm` writes what vLLM's /v1/completions
answers by its documentation (OpenAI-compatible server, `prompt_logprobs`, `return_token_ids`, 0.10
to 0.11): no vLLM was run here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

VOCAB_SIZE = 12
EOS = 1


def _rows() -> np.ndarray:
    logits_VV = np.random.default_rng(5).normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 2
    return logits_VV - np.log(np.exp(logits_VV).sum(1, keepdims=True))


LOGP_VV = _rows()
"""float64 [V, V]: log q(column | row)."""


def likeliest(before: int, count: int) -> list[tuple[float, int]]:
    """Return the `count` likeliest (log-prob, id) after an id, the likeliest first."""
    order = np.argsort(-LOGP_VV[before], kind="stable")[:count]
    return [(float(LOGP_VV[before, i]), int(i)) for i in order]


def written(ids: list[int], most: int, stop_ids: list[int]) -> list[int]:
    """Return the greedy answer to a prompt: at most `most` ids, up to an end token."""
    found: list[int] = []
    while len(found) < most:
        found.append(likeliest(found[-1] if found else ids[-1], 1)[0][1])
        if found[-1] in (EOS, *stop_ids):
            break
    return found


def sglang(body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of SGLang's /generate to a request."""
    ids, sampling = body["input_ids"], body["sampling_params"]
    out = written(ids, sampling["max_new_tokens"], sampling.get("stop_token_ids", []))
    ended = bool(out) and out[-1] in (EOS, *sampling.get("stop_token_ids", []))
    reason = {"type": "stop", "matched": out[-1]} if ended else {"type": "length", "length": 0}
    meta: dict[str, Any] = {"id": body.get("rid"), "finish_reason": reason, "cached_tokens": 0}
    meta["prompt_tokens"] = len(ids)
    start, top, named = body.get("logprob_start_len", len(ids)), *_wanted(body)
    if body.get("return_logprob"):
        befores = [ids[i - 1] if i > start else None for i in range(start, len(ids))]
        asked = list(zip(befores, ids[start:], strict=True))
        meta["input_token_logprobs"] = [
            [None if before is None else float(LOGP_VV[before, i]), i, None] for before, i in asked
        ]
        after = list(zip([ids[-1], *out], out, strict=False))
        meta["output_token_logprobs"] = [[float(LOGP_VV[b, i]), i, None] for b, i in after]
        if top:
            meta["input_top_logprobs"] = [_top(before, top) for before, _ in asked]
            meta["output_top_logprobs"] = [_top(before, top) for before, _ in after]
        if named:
            meta["input_token_ids_logprobs"] = [
                None if b is None else [[float(LOGP_VV[b, i]), i, None] for i in named]
                for b, _ in asked
            ]
    reply = {"text": "", "output_ids": out, "meta_info": meta}
    return reply | ({"prompt_token_ids": ids} if body.get("return_prompt_token_ids") else {})


def _wanted(body: dict[str, Any]) -> tuple[int, list[int]]:
    return body.get("top_logprobs_num", 0), body.get("token_ids_logprob", [])


def _top(before: int | None, count: int) -> list[list[Any]] | None:
    return None if before is None else [[logp, i, None] for logp, i in likeliest(before, count)]


def vllm(body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of vLLM's /v1/completions to a request."""
    ids, count = body["prompt"], body.get("prompt_logprobs")
    rows: list[Any] = [None]
    for before, i in pairwise(ids):
        ranked = likeliest(before, VOCAB_SIZE)
        rank = [each for _, each in ranked].index(i) + 1
        kept = {str(each): _entry(logp, n) for n, (logp, each) in enumerate(ranked[: count or 0])}
        rows.append({str(i): _entry(float(LOGP_VV[before, i]), rank - 1)} | kept)
    choice = _choice(body) | {"prompt_logprobs": None if count is None else rows}
    return _completion(body, choice)


def _entry(logp: float, place: int) -> dict[str, Any]:
    return {"logprob": logp, "rank": place + 1, "decoded_token": "a"}


def sglang_openai(body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of SGLang's /v1/completions to a request; it ignores prompt_logprobs."""
    return _completion(body, _choice(body))


def _choice(body: dict[str, Any]) -> dict[str, Any]:
    ids = body["prompt"]
    out = written(ids, body["max_tokens"], body.get("stop_token_ids", []))
    ended = out[-1] in (EOS, *body.get("stop_token_ids", []))
    whole = [*ids, *out] if body.get("echo") else [ids[-1], *out]
    values: list[float | None] = [None] if body.get("echo") else []
    values += [float(LOGP_VV[b, i]) for b, i in pairwise(whole)]
    choice: dict[str, Any] = {"index": 0, "text": "a" * len(out), "logprobs": None}
    if body.get("logprobs") is not None:
        choice["logprobs"] = {"token_logprobs": values, "tokens": ["a"] * len(values)}
    choice["finish_reason"] = "stop" if ended else "length"
    choice["stop_reason"] = None
    echoed = body.get("return_token_ids")
    return choice | ({"prompt_token_ids": ids, "token_ids": out} if echoed else {})


def chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of OpenAI's /v1/chat/completions: a letter for each id, and no ids."""
    ids = [
        each % VOCAB_SIZE for message in body["messages"] for each in message["content"].encode()
    ]
    out = written(ids, body["max_tokens"], [])
    ended = out[-1] == EOS
    text = "".join(chr(ord("a") + each) for each in out if each != EOS)
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop" if ended else "length"}
    return _completion(body, choice)


def _completion(body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "model": body["model"], "choices": [choice]}
