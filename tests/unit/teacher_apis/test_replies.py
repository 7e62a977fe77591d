"""Scores of servers that are not ours equal the model's, and nothing else is taken for them."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.foreign_replies import LOGP_VV, VOCAB_SIZE, likeliest, sglang, sglang_openai, vllm
from megatron_opd.teacher_apis import openai as openai_api
from megatron_opd.teacher_apis import sglang as sglang_api
from megatron_opd.teacher_apis.foreign import ForeignClient
from megatron_opd.teacher_apis.openai import OpenaiClient
from megatron_opd.teacher_apis.sglang import SglangClient
from sglang_bridge.errors import BadReply, RequestAborted, ServerRefused
from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from tests.support.foreign_server import IDS, ForeignServer, Form, score_request

KINDS: dict[Form, type[ForeignClient]] = {
    "sglang": SglangClient,
    "vllm": OpenaiClient,
    "sglang_openai": OpenaiClient,
}
"""Those that score."""
URL = "http://127.0.0.1:1"
Damage = Callable[[dict[str, Any]], Any]


def scored(form: Form, request: ScoreRequest, damage: Damage = lambda reply: None) -> ScoreReply:
    async def run() -> ScoreReply:
        async with ForeignServer(form, damage=damage).up() as server:
            client = KINDS[form](server.url, timeout_s=20)
            async with client:
                await client.info()
                return await client.score(request)

    return asyncio.run(run())


def wrote(form: Form, request: RolloutRequest, damage: Damage = lambda reply: None) -> RolloutReply:
    async def run() -> RolloutReply:
        async with (
            ForeignServer(form, damage=damage).up() as server,
            KINDS[form](server.url, timeout_s=20) as client,
        ):
            return await client.generate(request)

    return asyncio.run(run())


@pytest.mark.parametrize("form", KINDS)
def test_sampled_ids_have_the_models_log_probs(form: Form):
    request = score_request()
    expected = [LOGP_VV[IDS[at], IDS[at + 1]] for at in request.position_T]
    np.testing.assert_allclose(scored(form, request).logp_N, expected, rtol=1e-6)


@pytest.mark.parametrize("form", ["sglang", "vllm"])
@pytest.mark.parametrize("atoms", [1, 4, VOCAB_SIZE])
def test_likeliest_ids_weigh_their_probabilities(form: Form, atoms: int):
    request = score_request(atoms)
    selection = scored(form, request).selection
    assert selection is not None
    for row, at in enumerate(request.position_T):
        top = {i: logp for logp, i in likeliest(IDS[at], atoms)}
        path = IDS[at + 1]
        cut = slice(selection.offsets_T1[row], selection.offsets_T1[row + 1])
        ids = selection.ids_N[cut].tolist()
        assert ids == sorted({*top, path})
        np.testing.assert_allclose(selection.logp_N[cut], LOGP_VV[IDS[at], ids], rtol=1e-6)
        weights = [np.exp(top[i]) if i in top else 0.0 for i in ids]
        np.testing.assert_allclose(selection.weight_N[cut], weights, rtol=1e-6)
        assert selection.ids_N[selection.given_N[row]] == path


def test_a_stock_sglang_scores_a_few_other_ids_at_every_position():
    request = score_request()
    ids_TK = np.stack([np.append([0, 8], i) for i in request.ids_N]).astype(np.int32)
    asked = score_request(offsets_T1=np.arange(5) * 3, ids_N=ids_TK.reshape(-1))
    befores = np.array(IDS)[asked.position_T]
    expected = LOGP_VV[np.repeat(befores, 3), asked.ids_N]
    np.testing.assert_allclose(scored("sglang", asked).logp_N, expected, rtol=1e-6)


def test_what_an_api_cannot_score_is_refused_by_name():
    others = score_request(ids_N=np.zeros(4, np.int32))
    many = np.arange(300, dtype=np.int32)
    whole = score_request(offsets_T1=np.arange(5) * 300, ids_N=np.tile(many, 4))
    cases: list[tuple[Form, ScoreRequest, str]] = [
        ("vllm", others, "the sampled ids and the likeliest ones alone"),
        ("sglang", whole, "at most 256 others in a request"),
        ("sglang", score_request(num_draws=2), "draws no ids"),
        ("vllm", score_request(num_draws=2), "draws no ids"),
        ("vllm", score_request(temperature=0.5), "at temperature 1 alone, got 0.5"),
        ("sglang", score_request(temperature=2.0), "at temperature 1 alone, got 2"),
    ]
    for form, request, word in cases:
        with pytest.raises(ServerRefused, match=f"teacher.api .*{word}"):
            scored(form, request)
    with pytest.raises(BadReply, match=r"set support.type: path, or teacher.api: sglang"):
        scored("sglang_openai", score_request(3))


def meta(reply: dict[str, Any]) -> dict[str, Any]:
    return reply["meta_info"]


def choice(reply: dict[str, Any]) -> dict[str, Any]:
    return reply["choices"][0]


def late(values: list[Any]) -> None:
    """Each value in the place behind its own."""
    values[2:] = values[1:-1]


def other_id(values: list[Any]) -> None:
    values[3][1] = 0


def without_own(row: dict[str, Any]) -> None:
    del row[str(IDS[3])]


FAULTS: list[tuple[Form, int, Damage]] = [
    ("sglang", 0, lambda r: r.pop("prompt_token_ids")),
    ("sglang", 0, lambda r: r["prompt_token_ids"].pop(0)),
    ("sglang", 0, lambda r: r["prompt_token_ids"].reverse()),
    ("sglang", 0, lambda r: meta(r)["input_token_logprobs"].pop()),
    ("sglang", 0, lambda r: late(meta(r)["input_token_logprobs"])),
    ("sglang", 0, lambda r: other_id(meta(r)["input_token_logprobs"])),
    ("sglang", 0, lambda r: meta(r)["input_token_logprobs"][2].__setitem__(0, None)),
    ("sglang", 0, lambda r: meta(r)["input_token_logprobs"][2].__setitem__(0, 0.5)),
    ("sglang", 0, lambda r: meta(r)["input_token_logprobs"][2].__setitem__(0, True)),
    ("sglang", 0, lambda r: meta(r)["input_token_logprobs"][2].__setitem__(0, -1e300)),
    ("sglang", 0, lambda r: meta(r)["input_token_logprobs"][2].__setitem__(0, "-1")),
    ("sglang", 3, lambda r: late(meta(r)["input_top_logprobs"])),
    ("sglang", 3, lambda r: meta(r)["input_top_logprobs"].pop()),
    ("sglang", 3, lambda r: meta(r).pop("input_top_logprobs")),
    ("sglang", 3, lambda r: meta(r)["input_top_logprobs"].__setitem__(1, None)),
    ("sglang", 3, lambda r: meta(r)["input_top_logprobs"][1].clear()),
    ("sglang", 3, lambda r: meta(r)["input_top_logprobs"][1].append([-9.0, 0, None])),
    ("sglang", 3, lambda r: meta(r)["input_top_logprobs"][1][0].__setitem__(1, -1)),
    ("vllm", 0, lambda r: choice(r).pop("prompt_token_ids")),
    ("vllm", 0, lambda r: choice(r)["prompt_token_ids"].pop()),
    ("vllm", 0, lambda r: choice(r)["prompt_logprobs"].pop()),
    ("vllm", 0, lambda r: late(choice(r)["prompt_logprobs"])),
    ("vllm", 0, lambda r: without_own(choice(r)["prompt_logprobs"][3])),
    ("vllm", 0, lambda r: choice(r)["prompt_logprobs"].__setitem__(3, {"x": {"logprob": -1.0}})),
    ("vllm", 2, lambda r: late(choice(r)["prompt_logprobs"])),
    ("vllm", 2, lambda r: choice(r)["prompt_logprobs"][3].update({"0": {"logprob": -0.01}})),
    ("sglang_openai", 0, lambda r: choice(r).pop("prompt_token_ids")),
    ("sglang_openai", 0, lambda r: choice(r)["prompt_token_ids"].append(3)),
    ("sglang_openai", 0, lambda r: choice(r)["logprobs"]["token_logprobs"].pop(0)),
    ("sglang_openai", 0, lambda r: choice(r)["logprobs"].__setitem__("token_logprobs", [None])),
    ("sglang_openai", 0, lambda r: choice(r).__setitem__("logprobs", None)),
    ("sglang_openai", 0, lambda r: r.__setitem__("choices", [])),
]


@pytest.mark.parametrize(("form", "atoms", "damage"), FAULTS)
def test_other_ids_positions_and_numbers_are_refused(form: Form, atoms: int, damage: Damage):
    request = score_request(atoms)
    scored(form, request)
    with pytest.raises(BadReply):
        scored(form, request, damage)


def rollout_request(**keys: Any) -> RolloutRequest:
    asked = {"rid": "g", "input_ids": [3, 5], "max_new_tokens": 6, "temperature": 0.0}
    whole: dict[str, Any] = {"record": True, **asked, **keys}
    return RolloutRequest(**whole)


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("atoms", [0, 3])
def test_answers_have_the_log_probs_of_their_ids(form: Form, atoms: int):
    reply = wrote(form, rollout_request(num_atoms=atoms))
    ids = reply.output_ids_T.tolist()
    befores = [5, *ids[:-1]]
    draws = reply.draws
    assert draws is not None
    assert reply.spans == ((0, 0, len(ids)),)
    assert draws.ids_N[draws.path_T].tolist() == ids
    rows = np.repeat(befores, np.diff(draws.offsets_T1))
    np.testing.assert_allclose(draws.sampler_logp_N, LOGP_VV[rows, draws.ids_N], rtol=1e-6)
    if atoms and form == "sglang":
        assert all(np.diff(draws.offsets_T1) >= atoms)
    else:  # OpenAI's route keys likeliest ids by text: the path alone
        assert draws.num_ids == len(ids)


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ("sglang", lambda r: r["output_ids"].append(3)),
        ("sglang", lambda r: meta(r)["output_token_logprobs"][0].__setitem__(1, 0)),
        ("sglang", lambda r: meta(r).__setitem__("finish_reason", {"type": "tired"})),
        ("vllm", lambda r: choice(r)["token_ids"].extend([3] * 9)),
        ("vllm", lambda r: choice(r).pop("token_ids")),
        ("vllm", lambda r: choice(r)["logprobs"]["token_logprobs"].pop()),
        ("vllm", lambda r: choice(r).__setitem__("finish_reason", None)),
    ],
)
def test_answers_that_do_not_hang_together_are_refused(form: Form, damage: Damage):
    with pytest.raises(BadReply):
        wrote(form, rollout_request(), damage)


def test_a_request_that_the_server_gave_up_is_no_answer():
    def abort(reply: dict[str, Any]) -> None:
        meta(reply)["finish_reason"] = {"type": "abort", "message": "full"}

    with pytest.raises(RequestAborted, match="full"):
        wrote("sglang", rollout_request(), abort)


def test_the_second_request_asks_in_the_form_of_the_first_reply():
    async def asked(form: Form) -> list[dict[str, Any]]:
        async with (
            ForeignServer(form).up() as server,
            OpenaiClient(server.url, timeout_s=20) as client,
        ):
            for _ in range(2):
                await client.score(score_request())
            return server.asked

    first, second = asyncio.run(asked("vllm"))
    assert (first["echo"], first["prompt_logprobs"]) == (True, 0)
    assert second["prompt_logprobs"] == 0
    assert "echo" not in second
    first, second = asyncio.run(asked("sglang_openai"))
    assert second["echo"]
    assert "prompt_logprobs" not in second


def test_the_parsers_read_recorded_replies_without_a_server():
    request = score_request(2)
    body = {"prompt": IDS, "max_tokens": 1, "model": "", "return_token_ids": True}
    by_id = openai_api.parse_scores(URL, vllm(body | {"prompt_logprobs": 2}), request)
    plain = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    keys = {"logprob_start_len": 1, "return_prompt_token_ids": True, "top_logprobs_num": 2}
    none = np.zeros(0, np.int32)
    by_pair = sglang_api.parse_scores(URL, sglang(plain | keys), request, none)
    echo = sglang_openai(body | {"echo": True, "logprobs": 1})
    by_place = openai_api.parse_scores(URL, echo, score_request())
    np.testing.assert_array_equal(by_id.logp_N, by_pair.logp_N)
    np.testing.assert_array_equal(by_id.logp_N, by_place.logp_N)
