"""Answers of which the text alone is known, and what is no answer."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.foreign_replies import EOS, written
from megatron_opd.teacher_apis.chat import ChatClient
from megatron_opd.teacher_apis.foreign import ForeignClient, WrittenText
from megatron_opd.teacher_apis.openai import OpenaiClient
from sglang_bridge.errors import BadReply, ServerRefused
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from tests.support.foreign_server import ForeignServer, Form, score_request

REQUEST = RolloutRequest(rid="w", input_ids=[3, 5], max_new_tokens=4, temperature=0.5, seed=2**40)
CHAT = ({"role": "user", "content": "hello"},)


def wrote(
    form: Form, kind: type[ForeignClient], damage: Callable[[dict[str, Any]], Any]
) -> tuple[RolloutReply | WrittenText, dict[str, Any]]:
    async def run() -> tuple[RolloutReply | WrittenText, dict[str, Any]]:
        async with (
            ForeignServer(form, damage=damage).up() as server,
            kind(server.url, timeout_s=20) as client,
        ):
            return await client.write(REQUEST, CHAT), server.asked[0]

    return asyncio.run(run())


def test_a_chat_is_answered_by_text():
    found, asked = wrote("chat", ChatClient, lambda reply: None)
    out = written([each % 12 for each in b"hello"], 4, [])
    text = "".join(chr(ord("a") + each) for each in out if each != EOS)
    assert isinstance(found, WrittenText)
    assert (found.text, found.finish_reason) == (text, "stop" if EOS in out else "length")
    assert asked["messages"] == list(CHAT)
    assert (asked["max_tokens"], asked["temperature"]) == (4, 0.5)


def test_a_completion_without_ids_is_its_text():
    def no_ids(reply: dict[str, Any]) -> None:
        del reply["choices"][0]["token_ids"]

    found, _ = wrote("vllm", OpenaiClient, no_ids)
    assert isinstance(found, WrittenText)
    with_ids, _ = wrote("vllm", OpenaiClient, lambda reply: None)
    assert isinstance(with_ids, RolloutReply)
    assert with_ids.output_ids_T.tolist() == written([3, 5], 4, [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda reply: reply.pop("choices"),
        lambda reply: reply["choices"][0].__setitem__("finish_reason", "content_filter"),
        lambda reply: reply["choices"][0]["message"].__setitem__("content", None),
        lambda reply: reply["choices"].append(reply["choices"][0]),
    ],
)
def test_what_is_no_answer_is_refused(damage: Callable[[dict[str, Any]], Any]):
    with pytest.raises(BadReply):
        wrote("chat", ChatClient, damage)


def test_it_scores_nothing():
    async def run() -> None:
        async with ChatClient("http://127.0.0.1:1", timeout_s=1) as client:
            with pytest.raises(ServerRefused, match="scores nothing"):
                await client.score(score_request())
            with pytest.raises(ServerRefused, match="shows no ids"):
                await client.generate(REQUEST)

    asyncio.run(run())
