"""What teachers' servers that are not ours answer with 200 -> scores, answers, texts.

The model behind the replies is harness/foreign_replies.py's. Nothing tells a number that is wrong
and possible from one that is right: the oracle asks that every score is the number which the reply
has for our id at its own place, read anew here, and that all it echoes is ours. (Where a server
echoes numbers alone, as SGLang's OpenAI route does, a shift of them all has no trace in a reply:
scoring.guard finds it.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np

from checks.fuzz.engine import Target
from checks.fuzz.mutations import Maker, damaged_bytes, damaged_tree, json_bytes
from harness import foreign_replies
from megatron_opd.teacher_apis import chat, openai, sglang
from sglang_bridge.arrays import LOGP_SLACK
from sglang_bridge.errors import BadReply, RequestAborted
from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest

URL = "http://127.0.0.1:1"
IDS = [3, 5, 7, 2, 9, 4, 11, 6]
RUNS = ((2, 4), (6, 8))
PLACES = [at for start, stop in RUNS for at in range(start, stop)]
PATH = [IDS[at] for at in PLACES]
OTHERS = np.array([0, 8], np.int32)
FIRST = RUNS[0][0] - 1
SLACK = 1e-5
NONE = np.zeros(0, np.int32)
ANSWER = RolloutRequest(rid="g", input_ids=[3, 5], max_new_tokens=6, temperature=0.0, num_atoms=2)
PLAIN = msgspec.structs.replace(ANSWER, num_atoms=0, record=True)
Given = tuple[str, bytes]


def scores(atoms: int = 0, *, others: bool = False) -> ScoreRequest:
    """For the sampled ids, the likeliest ones, and two others at each position."""
    rows = [[*OTHERS.tolist(), each] if others else [each] for each in PATH]
    return ScoreRequest(
        rid="s",
        input_ids=IDS,
        runs=RUNS,
        offsets_T1=np.arange(len(PATH) + 1) * len(rows[0]),
        ids_N=np.array(rows, np.int32).reshape(-1),
        num_atoms=atoms,
    )


REQUESTS: dict[str, ScoreRequest] = {
    "sglang": scores(),
    "sglang top": scores(3),
    "sglang others": scores(others=True),
    "vllm": scores(),
    "vllm top": scores(3),
    "echo": scores(),
}
PROMPT = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
ASKED = PROMPT | {"logprob_start_len": FIRST, "return_prompt_token_ids": True}
COMPLETED = {"prompt": IDS, "max_tokens": 1, "model": "", "return_token_ids": True}
WRITING = {"prompt": [3, 5], "max_tokens": 6, "model": "", "return_token_ids": True}
SOUND: dict[str, Any] = {
    "sglang": foreign_replies.sglang(ASKED),
    "sglang top": foreign_replies.sglang(ASKED | {"top_logprobs_num": 3}),
    "sglang others": foreign_replies.sglang(ASKED | {"token_ids_logprob": OTHERS.tolist()}),
    "vllm": foreign_replies.vllm(COMPLETED | {"prompt_logprobs": 0}),
    "vllm top": foreign_replies.vllm(COMPLETED | {"prompt_logprobs": 3}),
    "echo": foreign_replies.sglang_openai(COMPLETED | {"echo": True, "logprobs": 1}),
    "sglang answer": foreign_replies.sglang(
        {
            "input_ids": [3, 5],
            "sampling_params": {"max_new_tokens": 6},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "return_prompt_token_ids": True,
        }
    ),
    "vllm answer": foreign_replies.vllm(WRITING | {"logprobs": 1}),
    "chat answer": foreign_replies.chat(
        {"messages": [{"content": "hello"}], "max_tokens": 6, "model": ""}
    ),
}
PARSERS: dict[str, Callable[[Any], Any]] = {
    "sglang": lambda tree: sglang.parse_scores(URL, tree, REQUESTS["sglang"], NONE),
    "sglang top": lambda tree: sglang.parse_scores(URL, tree, REQUESTS["sglang top"], NONE),
    "sglang others": lambda tree: sglang.parse_scores(URL, tree, REQUESTS["sglang others"], OTHERS),
    "vllm": lambda tree: openai.parse_scores(URL, tree, REQUESTS["vllm"]),
    "vllm top": lambda tree: openai.parse_scores(URL, tree, REQUESTS["vllm top"]),
    "echo": lambda tree: openai.parse_scores(URL, tree, REQUESTS["echo"]),
    "sglang answer": lambda tree: sglang.parse_answer(URL, tree, ANSWER),
    "vllm answer": lambda tree: openai.parse_answer(URL, tree, PLAIN),
    "chat answer": lambda tree: chat.parse_text(URL, tree, PLAIN),
}


def call(given: Given) -> tuple[Any, Any]:
    """(the reply, what it was read as)."""
    try:
        tree = msgspec.json.decode(given[1])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadReply("the reply is not JSON") from None
    return tree, PARSERS[given[0]](tree)


def oracle(given: Given, result: tuple[Any, Any]) -> str | None:
    """Every number is that of our id at its place, and all that is echoed is ours."""
    kind, (tree, found) = given[0], result
    if isinstance(found, ScoreReply):
        return _scores_fault(kind, tree, found)
    if isinstance(found, RolloutReply):
        return _answer_fault(kind, tree, found)
    text = tree["choices"][0]["message"]["content"]
    ended = tree["choices"][0]["finish_reason"]
    return None if (found.text, found.finish_reason) == (text, ended) else "another text"


def _scores_fault(kind: str, tree: Any, found: ScoreReply) -> str | None:
    whole = tree if kind.startswith("sglang") else tree["choices"][0]
    if whole["prompt_token_ids"] != IDS:
        return "the echoed ids are others than those sent"
    request = REQUESTS[kind]
    expected = [_score(kind, whole, row, int(i)) for row, i in _pairs(request)]
    if len(found.logp_N) != len(expected) or not _equal(found.logp_N.tolist(), expected):
        return "scores other than those of our ids at their places"
    if not request.num_atoms:
        return None
    selection = found.selection
    if selection is None:
        return "no likeliest ids"
    for row, at in enumerate(PLACES):
        cut = slice(selection.offsets_T1[row], selection.offsets_T1[row + 1])
        ids = selection.ids_N[cut].tolist()
        if ids != sorted(set(ids)) or IDS[at] not in ids:
            return "a row that holds an id twice, or not its own"
        if not _equal(selection.logp_N[cut].tolist(), [_top(kind, whole, at, i) for i in ids]):
            return "likeliest ids with numbers of others"
        if sum(math.exp(each) for each in selection.logp_N[cut]) > 1.02:
            return "a row of more than all probability"
    return None


def _pairs(request: ScoreRequest) -> list[tuple[int, int]]:
    counts = np.diff(request.offsets_T1)
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    return list(zip(rows, np.asarray(request.ids_N).tolist(), strict=True))


def _score(kind: str, whole: Any, row: int, token: int) -> float | None:
    """What the reply has for an id of a row, read from its place; None: nothing that may be."""
    at = PLACES[row]
    if kind == "echo":
        return _number(whole["logprobs"]["token_logprobs"][at])
    if kind.startswith("vllm"):
        return _number(whole["prompt_logprobs"][at][str(token)]["logprob"])
    meta = whole["meta_info"]
    if token == IDS[at]:
        entry = meta["input_token_logprobs"][at - FIRST]
        return _number(entry[0]) if entry[1] == token else None
    entry = meta["input_token_ids_logprobs"][at - FIRST][OTHERS.tolist().index(token)]
    return _number(entry[0]) if entry[1] == token else None


def _top(kind: str, whole: Any, at: int, token: int) -> float | None:
    if kind == "vllm top":
        keys = [key for key in whole["prompt_logprobs"][at] if int(key) == token]
        return _number(whole["prompt_logprobs"][at][keys[0]]["logprob"]) if keys else None
    rows = whole["meta_info"]["input_top_logprobs"][at - FIRST]
    found = [entry[0] for entry in rows if entry[1] == token]
    if token == IDS[at]:
        found = [whole["meta_info"]["input_token_logprobs"][at - FIRST][0], *found]
    return _number(found[0]) if found else None


def _number(value: Any) -> float | None:
    sound = type(value) in (int, float) and -3e38 < value <= LOGP_SLACK
    return float(value) if sound else None


def _equal(found: list[float], expected: list[float | None]) -> bool:
    return all(
        e is not None and math.isclose(f, e, rel_tol=SLACK, abs_tol=2e-3)
        for f, e in zip(found, expected, strict=True)
    )


def _answer_fault(kind: str, tree: Any, found: RolloutReply) -> str | None:
    whole = tree if kind == "sglang answer" else tree["choices"][0]
    name = "output_ids" if kind == "sglang answer" else "token_ids"
    ids = found.output_ids_T.tolist()
    if whole["prompt_token_ids"] != [3, 5] or whole[name] != ids or len(ids) > 6:
        return "another prompt's, or other ids than those sent"
    if any(type(each) is not int or each < 0 for each in whole[name]):
        return "what is no id"
    if not ids:
        return None if found.draws is None else "a cache of nothing"
    if found.draws is None:
        return "no cache"
    logp_T = found.draws.sampler_logp_N[found.draws.path_T].tolist()
    if found.draws.ids_N[found.draws.path_T].tolist() != ids:
        return "a path of other ids"
    if kind == "vllm answer":
        values = whole["logprobs"]["token_logprobs"]
    else:
        entries = whole["meta_info"]["output_token_logprobs"]
        if [entry[1] for entry in entries] != ids:
            return "log-probs of other ids"
        values = [entry[0] for entry in entries]
    return None if _equal(logp_T, list(map(_number, values))) else "other log-probs"


def make(rng: Random) -> Given:
    """A sound reply that is damaged: its tree, its bytes, or one of its lists."""
    kind = rng.choice(list(SOUND))
    how = rng.randrange(5)
    if how == 0:
        return kind, BYTES[kind](rng)
    if how == 1:
        return kind, json_bytes(_shifted(rng, json.loads(json_bytes(SOUND[kind]))))
    if how == 2 and rng.random() < 0.02:
        return kind, b"[" * 100_000 if rng.random() < 0.5 else b'{"a":"' + b"x" * 3_000_000 + b'"}'
    return kind, json_bytes(TREES[kind](rng))


def _shifted(rng: Random, tree: Any) -> Any:
    """The same with one of its lists late, early, reversed, cut or doubled."""
    lists: list[list[Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list) and len(node) > 1:
            lists.append(node)
        waiting += (
            node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        )
    if not lists:
        return tree
    chosen = rng.choice(lists)
    chosen[:] = rng.choice(
        (
            [chosen[0], *chosen[:-1]],
            [*chosen[1:], chosen[-1]],
            chosen[::-1],
            chosen[1:],
            chosen[:-1],
            [*chosen, chosen[-1]],
            rng.sample(chosen, len(chosen)),
        )
    )
    return tree


TREES: dict[str, Maker] = {kind: damaged_tree([tree]) for kind, tree in SOUND.items()}
BYTES: dict[str, Maker] = {kind: damaged_bytes([json_bytes(tree)]) for kind, tree in SOUND.items()}
TARGET = Target("teacher_replies", make, call, (BadReply, RequestAborted), oracle, share=4.0)
