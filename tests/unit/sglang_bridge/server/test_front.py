"""The route for work: what SGLang is asked, what goes out, and what it refuses."""

import re
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
from sglang_bridge.server.compat import hooks, ranks
from sglang_bridge.server.entry import offer_standins
from sglang_bridge.server.scoring import ScoreRecord, runs_of
from sglang_bridge.server.text import from_text, to_text
from sglang_bridge.work_request import decode_work, encode_rollout, encode_score
from tests.support.bridge_replies import (
    REQUEST,
    SCORE_REQUEST,
    URL,
    packed,
    rollout_reply,
    score_reply,
    selection_payload,
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
    front.add_work_routes()

    def post(
        body: bytes, answer: Any = None, route: str = wire.WORK_ROUTE, **given: Any
    ) -> tuple[Any, Manager]:
        manager = Manager(answer)
        state = SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setattr(http_server, "get_global_state", lambda: state)
        client = TestClient(http_server.app, raise_server_exceptions=False)
        return client.post(route, content=body, **given), manager

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
    del http_server.app.router.routes[-2:]
    monkeypatch.setattr(front, "MOST_BYTES", 1000)
    front.add_work_routes()
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
        with pytest.raises(ValueError, match=f"by {wire.WORK_ROUTE} and {wire.SCORE_ROUTE}, not"):
            plugin.around_validate(lambda *call: None, manager, obj, [1])
    asked = SimpleNamespace(
        sampling_params={"custom_params": {wire.NUM_DRAWS: 4, wire.PACKED: True}}
    )
    plugin.around_validate(lambda *call: None, manager, asked, [1])


SCORES = {"input_ids": [1, 2, 3, 4, 5], "runs": [[2, 3], [4, 5]], "ids": [[7, 8], [9]]}


def test_scores_as_json_are_those_of_the_request(ask):
    body = msgspec.json.encode(SCORES | {"num_atoms": 2, "num_draws": 2, "temperature": 2})
    row = selection_payload()
    arrays = {"length_T": [3, 1], "ids_N": [2, 7, 9, 4], "weight_N": [0.5, 0.25, 0.25, 1]}
    row |= packed(arrays | {"logp_N": [-0.75, -1, -2, 0]})
    answer, manager = ask(body, score_reply([-1, -2, -3], row), wire.SCORE_ROUTE)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "logp": [[-1.0, -2.0], [-3.0]],
        "selected": {
            "ids": [[2, 7, 9], [4]],
            "weights": [[0.5, 0.25, 0.25], [1.0]],
            "logp": [[-0.75, -1.0, -2.0], [0.0]],
        },
    }
    (asked,) = manager.asked
    params = asked.sampling_params["custom_params"]
    assert asked.logprob_start_len == 1
    assert runs_of(params) == [(2, 3), (4, 5)]
    assert ScoreRecord(params).ids_N.tolist() == [7, 8, 9]
    assert params[wire.SCORE_TEMPERATURE] == 2.0


def test_without_runs_and_ids_the_path_is_scored(ask):
    body = msgspec.json.encode({"input_ids": [5, 6, 7]})
    answer, manager = ask(body, score_reply([-1, -2]), wire.SCORE_ROUTE)
    assert answer.json() == {"logp": [[-1.0], [-2.0]]}
    params = manager.asked[0].sampling_params["custom_params"]
    assert (runs_of(params), ScoreRecord(params).ids_N.tolist()) == ([(1, 3)], [6, 7])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"input_ids": [1, -2, 3, 4, 5]}, "not a request for scores: .*input_ids"),
        ({"input_ids": [1]}, "a run must have 1 <= start < stop, got 2..3|the last run must end"),
        ({"ids": [[7]]}, "ids must hold a row for each of 2 sampled ids, got 1"),
        ({"runs": [[0, 5]], "ids": None}, "a run must have 1 <= start < stop, got 0..5"),
        ({"runs": [[2, 4]], "ids": None}, "the last run must end with the last of 5 input_ids"),
        ({"temperature": 0}, "temperature must be > 0"),
        ({"num_draws": 65}, "num_draws must be in 0..64, got 65"),
        ({"top_k": 3}, "unknown field `top_k`"),
    ],
)
def test_scores_that_cannot_be_asked_are_refused_in_one_line(ask, change: dict, why: str):
    answer, manager = ask(msgspec.json.encode(SCORES | change), None, wire.SCORE_ROUTE)
    assert answer.status_code == 400
    (message,) = answer.json()["error"].values()
    assert re.search(why, message), message
    assert "\n" not in message
    assert manager.asked == []


def test_a_score_that_is_not_finite_is_no_answer(ask):
    body = msgspec.json.encode({"input_ids": [5, 6, 7]})
    answer, _ = ask(body, score_reply([-1, float("nan")]), wire.SCORE_ROUTE)
    assert (answer.status_code, answer.text) == (
        500,
        "this server: logp_N holds values that are not finite",
    )


def test_a_server_whose_hooks_are_not_in_place_does_not_serve(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    added: list[int] = []
    monkeypatch.setattr(front, "add_work_routes", lambda: added.append(1))
    targets = hooks.wanted(cuda=False, gates=False)
    monkeypatch.setattr(HookRegistry, "_patched", set(targets))
    front.before_serving("SGLang's arguments")
    assert added == [1]
    monkeypatch.setattr(HookRegistry, "_patched", set(targets) - {hooks.LOGITS})
    with pytest.raises(RuntimeError, match=r"not hooked: .*_get_logits"):
        front.before_serving()
    assert added == [1]
