"""The route for work: what SGLang is asked, what goes out, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.parse import parse_rollout, parse_scores
from sglang_bridge.server import front, plugin
from sglang_bridge.server.compat import ranks
from sglang_bridge.server.entry import offer_standins
from sglang_bridge.server.scoring import ScoreRecord, runs_of
from sglang_bridge.server.text import from_text, to_text
from sglang_bridge.work_request import decode_work, encode_rollout, encode_score
from tests.support.bridge_replies import (
    REQUEST,
    SCORE_REQUEST,
    URL,
    rollout_reply,
    score_reply,
)

offer_standins()
from sglang.srt.entrypoints import http_server  # noqa: E402  (it needs torchvision)
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402


def test_what_sglang_is_asked_for_a_completion():
    asked = GenerateReqInput(**front.generate_arguments(decode_work(encode_rollout(REQUEST))))
    asked.normalize_batch_and_arguments()
    assert (asked.rid, asked.input_ids, asked.return_logprob) == ("r", [1, 2, 3], False)
    params = asked.sampling_params
    assert params["skip_special_tokens"] is False
    assert "sampling_seed" not in params
    assert params["custom_params"] == {wire.NUM_ATOMS: 0, wire.NUM_DRAWS: 4, wire.PACKED: True}


def test_ids_to_score_reach_the_scheduler():
    arguments = front.generate_arguments(decode_work(encode_score("s-1.", SCORE_REQUEST)))
    record = ScoreRecord(arguments["sampling_params"]["custom_params"])
    assert record.offsets_T1.tolist() == [0, 2, 2, 3]
    assert record.ids_N.tolist() == [7, 8, 9]
    assert runs_of(arguments["sampling_params"]["custom_params"]) == [(2, 3), (5, 7)]
    assert arguments["logprob_start_len"] == 1


def test_an_answer_is_read_as_it_was_and_carries_nothing_else():
    whole = rollout_reply()
    said = whole | {"output_ids": [5, 9, 5], "text": "secret"}
    said["meta_info"] = whole["meta_info"] | {"input_token_logprobs": [[-1.0, 5, None]] * 1000}
    body = front.encode_answer(said)
    assert b"secret" not in body
    assert b"input_token" not in body
    found = parse_rollout(URL, msgspec.msgpack.decode(body), REQUEST)
    assert found.output_ids_T.tolist() == [5, 9, 5]
    scored = front.encode_answer(score_reply([-1, -2, -3]) | {"output_ids": []})
    assert parse_scores(URL, msgspec.msgpack.decode(scored), SCORE_REQUEST).logp_N[1] == -2


class Manager:
    """Answers `answer`, or raises it; keeps what it was asked."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, []

    async def generate_request(self, asked: GenerateReqInput, request: Any):
        self.asked.append(asked)
        if isinstance(self.answer, Exception):
            raise self.answer
        yield self.answer


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch):
    """Posts a body to SGLang's own application: (answer, manager)."""
    routes = list(http_server.app.router.routes)
    front.add_work_route()

    def post(body: bytes, answer: Any = None, **given: Any) -> tuple[Any, Manager]:
        manager = Manager(answer)
        state = SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setattr(http_server, "get_global_state", lambda: state)
        client = TestClient(http_server.app, raise_server_exceptions=False)
        return client.post(wire.WORK_ROUTE, content=body, **given), manager

    yield post
    http_server.app.router.routes[:] = routes


def test_the_route_answers_msgpack(ask):
    answer, manager = ask(encode_rollout(REQUEST), rollout_reply() | {"output_ids": [5, 9, 5]})
    assert (answer.status_code, answer.headers["content-type"]) == (200, wire.WORK_TYPE)
    assert parse_rollout(URL, msgspec.msgpack.decode(answer.content), REQUEST).draws is not None
    assert [each.rid for each in manager.asked] == ["r"]


def test_a_refusal_says_why(ask):
    answer, _ = ask(encode_rollout(REQUEST), ValueError("num_atoms must be at most 20"))
    assert answer.status_code == 400
    assert answer.json() == {"error": {"message": "num_atoms must be at most 20"}}


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff" * 100])
def test_garbage_is_refused_and_starts_nothing(ask, body: bytes):
    answer, manager = ask(body, rollout_reply())
    assert answer.status_code == 400
    assert "not a request for work" in answer.text
    assert manager.asked == []


def test_ids_that_are_none_are_refused(ask):
    broken = msgspec.msgpack.decode(encode_rollout(REQUEST)) | {"input_ids": b"??"}
    answer, manager = ask(msgspec.msgpack.encode(broken))
    assert answer.status_code == 400
    assert manager.asked == []


def test_a_flood_is_cut(ask, monkeypatch: pytest.MonkeyPatch):
    http_server.app.router.routes.pop()
    monkeypatch.setattr(front, "MOST_BYTES", 1000)
    front.add_work_route()
    answer, manager = ask(b"x" * 1001)
    assert (answer.status_code, answer.text) == (413, "a body of more than 1000 bytes")
    assert manager.asked == []


def test_text_that_is_no_array_is_refused():
    packed = pack(np.array([1, 70_000]))
    assert from_text(to_text(packed), "<i4").tolist() == [1, 70_000]
    for text, message in ((None, "expected an array as text"), ("*", "."), ("QUJDRA==", "whole")):
        with pytest.raises(ValueError, match=message):
            from_text(text, "<i4")


def test_draws_are_not_answered_as_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "keeps_experts", lambda manager: False)
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=20))
    for params in ({wire.NUM_DRAWS: 4}, {wire.SCORE_IDS: ""}):
        obj = SimpleNamespace(sampling_params={"custom_params": params})
        with pytest.raises(ValueError, match=f"answered by {wire.WORK_ROUTE} alone"):
            plugin.around_validate(lambda *call: None, manager, obj, [1])
    asked = SimpleNamespace(
        sampling_params={"custom_params": {wire.NUM_DRAWS: 4, wire.PACKED: True}}
    )
    plugin.around_validate(lambda *call: None, manager, asked, [1])
