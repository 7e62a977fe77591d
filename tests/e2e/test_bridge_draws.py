"""Draws of a real server against exact probabilities of the same weights under transformers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerRefused
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.server.launch import ServerProcess
from tests.figures import bounded
from tests.oracles import (
    behaviour_logp,
    chi_square_per_df,
    load_reference,
    reference_logits,
)

pytestmark = pytest.mark.e2e
PROMPT = list(range(40, 60))
TOLERANCE = 1e-5


def generate_all(url: str, requests: list[RolloutRequest]) -> list[RolloutReply]:
    async def run() -> list[RolloutReply]:
        async with ServerClient(url, timeout_s=120) as client:
            return await asyncio.gather(*map(client.generate, requests))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def reference(student_model: Path):
    return load_reference(student_model)


def worst_logp_error(
    logits_TV: np.ndarray, reply: RolloutReply, temperature: float, top_p: float
) -> float:
    """Largest error of a cached log-prob; a tie at the top-p cut may fall on either side."""
    draws, worst = reply.draws, 0.0
    for t, logits_V in enumerate(logits_TV):
        row = slice(draws.offsets_T1[t], draws.offsets_T1[t + 1])
        cuts = [top_p] if top_p == 1 else [top_p - 3e-6, top_p, top_p + 3e-6]
        errors = [
            np.abs(behaviour_logp(logits_V, temperature, cut)[draws.ids_N[row]] - draws.logp_N[row])
            for cut in cuts
        ]
        worst = max(worst, min(error.max() for error in errors))
    return worst


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.9)])
def test_log_probs_are_the_sampling_distributions(
    student_server: ServerProcess, reference, temperature: float, top_p: float
):
    requests = [
        RolloutRequest(
            rid=f"logp-{temperature}-{top_p}-{m}",
            input_ids=[*PROMPT, m],
            max_new_tokens=24,
            temperature=temperature,
            top_p=top_p,
            num_draws=m,
        )
        for m in (1, 2, 16, 64)  # one batch holds several widths
    ]
    for request, reply in zip(
        requests, generate_all(student_server.spec.url, requests), strict=True
    ):
        prompt = len(request.input_ids)
        logits = reference_logits(reference, [*request.input_ids, *reply.output_ids_T.tolist()])
        error = worst_logp_error(logits[prompt - 1 : -1], reply, temperature, top_p)
        bounded("draws: log-probs against transformers (nats)", error, TOLERANCE, request.rid)
        # One row off must not pass, or this test sees nothing.
        assert worst_logp_error(logits[prompt - 2 : -2], reply, temperature, top_p) > 0.1


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_draws_follow_the_exact_distribution(
    student_server: ServerProcess, reference, temperature: float, top_p: float
):
    """20k draws of one next-token distribution: chi-square; and none outside the nucleus."""
    requests = [
        RolloutRequest(
            rid=f"chi-{temperature}-{i}",
            input_ids=PROMPT,
            max_new_tokens=1,
            temperature=temperature,
            top_p=top_p,
            num_draws=m,
        )
        for i, m in enumerate([64] * 300 + [1] * 300)
    ]
    logp_V = behaviour_logp(reference_logits(reference, PROMPT)[-1], temperature, top_p)
    counts_V, paths_V = np.zeros(len(logp_V)), np.zeros(len(logp_V))
    for reply in generate_all(student_server.spec.url, requests):
        np.add.at(counts_V, reply.draws.ids_N, reply.draws.count_N)
        paths_V[reply.output_ids_T[0]] += 1
    ratio, df = chi_square_per_df(counts_V, np.exp(logp_V))
    bounded("draws: chi-square from its mean (standard deviations)", deviations(ratio, df), 6)
    ratio, df = chi_square_per_df(paths_V, np.exp(logp_V))
    bounded("path tokens: chi-square from its mean (standard deviations)", deviations(ratio, df), 6)


def deviations(ratio: float, df: int) -> float:
    """|chi-square / df - 1| in its standard deviations."""
    return abs(ratio - 1) / (2 / df) ** 0.5


def test_greedy_draws_are_the_argmax(student_server: ServerProcess, reference):
    request = RolloutRequest(
        rid="greedy", input_ids=PROMPT, max_new_tokens=8, temperature=0.0, num_draws=16
    )
    (reply,) = generate_all(student_server.spec.url, [request])
    logits = reference_logits(reference, [*PROMPT, *reply.output_ids_T.tolist()])
    assert reply.output_ids_T.tolist() == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert reply.draws.ids_N.tolist() == reply.output_ids_T.tolist()
    assert (reply.draws.count_N == 16).all()
    assert np.abs(reply.draws.logp_N).max() < TOLERANCE


def test_plain_generation_has_no_draws_and_keeps_its_versions(student_server: ServerProcess):
    request = RolloutRequest(rid="plain", input_ids=PROMPT, max_new_tokens=5)
    (reply,) = generate_all(student_server.spec.url, [request])
    assert reply.draws is None
    assert len(reply.output_ids_T) == 5
    assert reply.finish_reason == "length"
    assert [(start, stop) for _, start, stop in reply.spans] == [(0, 5)]


def test_stop_token_ends_the_response_and_is_part_of_it(student_server: ServerProcess):
    longer = RolloutRequest(
        rid="before-stop", input_ids=PROMPT, max_new_tokens=6, temperature=0.0, num_draws=4
    )
    (reply,) = generate_all(student_server.spec.url, [longer])
    stop = int(reply.output_ids_T[3])
    first = reply.output_ids_T.tolist().index(stop)
    request = RolloutRequest(
        rid="stop",
        input_ids=PROMPT,
        max_new_tokens=6,
        temperature=0.0,
        num_draws=4,
        stop_token_ids=(stop,),
    )
    (stopped,) = generate_all(student_server.spec.url, [request])
    assert stopped.finish_reason == "stop"
    assert stopped.output_ids_T.tolist() == reply.output_ids_T[: first + 1].tolist()
    assert stopped.draws.num_tokens == first + 1


def test_draws_with_a_grammar_are_refused(student_server: ServerProcess):
    """A grammar masks the logits after the observer saw them: the draws would be wrong."""

    async def run() -> None:
        async with ServerClient(student_server.spec.url, timeout_s=30) as client:
            params = {
                "max_new_tokens": 4,
                "regex": "[ab]*",
                "custom_params": {"bridge_num_draws": 4},
            }
            body = {"input_ids": PROMPT, "sampling_params": params}
            await client._http.request("POST", "/generate", body, repeatable=False)

    with pytest.raises(ServerRefused, match="cannot be combined with regex"):
        asyncio.run(run())
