"""Stop strings of a real server: what is returned is what was sampled, up to the string's end."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from sglang_bridge.protocol import RolloutRequest, ServerEnds
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.replies import ends_read_back, generate_all, span_error
from tests.support.figures import bounded
from tests.support.oracles import load_reference

pytestmark = pytest.mark.e2e
COUNT, TOKENS = 12, 32


def request_of(number: int, name: str) -> RolloutRequest:
    return RolloutRequest(
        exact=True,
        rid=f"{name}-{number}",
        input_ids=[40 + number, 50, 60],
        max_new_tokens=TOKENS,
        num_draws=8,
        seed=1000 + number,
    )


def test_a_server_says_where_it_ends_and_ends_where_it_is_asked_to(
    servers: dict[str, ServerProcess], student_model: Path, teacher_model: Path
):
    """What each file names is in the server's own list, and in ours; a request may name more.

    A third server, whose tokenizer names an end that no file does: test_bridge_quantised.py.
    """
    said = {"student": ServerEnds((1, 511), (1,)), "teacher": ServerEnds((510,), None)}
    for role, model in (("student", student_model), ("teacher", teacher_model)):
        assert ends_read_back(servers[role], model) == said[role]
        whole = generate_all(servers[role].url, [request_of(n, "open") for n in range(COUNT)])
        ids = [reply.output_ids_T.tolist() for reply in whole]
        named = [each[len(each) // 2] for each in ids]
        asked = [
            replace(request_of(n, "end"), stop_token_ids=(end,)) for n, end in enumerate(named)
        ]
        cut = generate_all(servers[role].url, asked)
        for sampled, end, reply in zip(ids, named, cut, strict=True):
            assert reply.output_ids_T.tolist() == sampled[: sampled.index(end) + 1]
            assert reply.finish_reason == "stop"


def test_a_response_is_cut_after_the_token_that_completes_the_string(
    student_server: ServerProcess, student_model: Path
):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(student_model)
    whole = generate_all(student_server.url, [request_of(n, "whole") for n in range(COUNT)])
    ids = [reply.output_ids_T.tolist() for reply in whole]
    # two neighbours of each response, somewhere in its middle
    stops = [tokenizer.decode(each[len(each) // 2 :][:2]) for each in ids]
    asked = [replace(request_of(n, "cut"), stop=("~never~", stop)) for n, stop in enumerate(stops)]
    cut = generate_all(student_server.url, asked)
    reference = load_reference(student_model)
    worst, strings = 0.0, 0
    for sampled, stop, request, reply in zip(ids, stops, asked, cut, strict=True):
        found = reply.output_ids_T.tolist()
        ends = [n for n in range(1, len(sampled) + 1) if stop in tokenizer.decode(sampled[:n])]
        assert found == sampled[: ends[0]]
        # a string that is completed by the end token ends the response as the token does
        strings += reply.finish_reason == "stop_string"
        assert reply.finish_reason in ("stop_string", "stop")
        draws = reply.draws
        assert draws is not None
        assert draws.num_tokens == len(found)
        assert np.array_equal(draws.ids_N[draws.path_T], reply.output_ids_T)
        worst = max(worst, span_error(reference, request, reply, 0, len(found)))
    assert strings >= COUNT // 2
    bounded("log-probs of responses cut at a string, against transformers (nats)", worst, 1e-5)
