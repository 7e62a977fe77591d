"""Draws of a real server against exact probabilities of the same weights under transformers."""

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerRefused
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.replies import generate_all
from tests.support.figures import bounded
from tests.support.models import VOCAB_SIZE
from tests.support.oracles import (
    behaviour_logp,
    chi_square_per_df,
    load_reference,
    reference_logits,
    selection_error,
    thin_draws,
)

pytestmark = pytest.mark.e2e
PROMPT = list(range(40, 60))
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference(student_model: Path):
    return load_reference(student_model)


def worst_errors(
    logits_TV: np.ndarray, reply: RolloutReply, request: RolloutRequest
) -> tuple[float, float]:
    """Largest errors of cached log-probs (nats) and of weights (relative).

    A tie at the top-p cut may fall on either side. Thin rows hold ceil(draws * tail mass) draws; a
    path alone is one draw.
    """
    draws, top_p, num_atoms = reply.draws, request.top_p, request.num_atoms
    num_draws = request.num_draws if request.selects else 1
    worst = [0.0, 0.0]
    for t, logits_V in enumerate(logits_TV):
        row = slice(draws.offsets_T1[t], draws.offsets_T1[t + 1])
        ids, weight, logp = draws.ids_N[row], draws.weight_N[row], draws.sampler_logp_N[row]
        cuts = [top_p] if top_p == 1 else [top_p - 3e-6, top_p, top_p + 3e-6]
        errors = []
        for cut in cuts:
            exact_V = behaviour_logp(logits_V, request.temperature, cut)
            counts = thin_draws(exact_V, num_atoms, num_draws) if request.thin else {num_draws}
            errors += [
                (
                    np.abs(exact_V[ids] - logp).max(),
                    selection_error(exact_V, ids, weight, num_atoms, count),
                )
                for count in counts
            ]
        worst = [max(*pair) for pair in zip(worst, min(errors), strict=True)]
    return worst[0], worst[1]


# (atoms, draws, thin): Monte Carlo, atoms + tail, top-k, the whole vocabulary, the path alone
SUPPORTS = [
    *((0, 1, False), (0, 2, False), (0, 64, False)),
    *((16, 48, False), (2, 1, False), (4, 64, True), (16, 48, True)),
    *((8, 0, False), (VOCAB_SIZE, 0, False), (0, 0, False)),
]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.9)])
def test_every_support_is_of_the_sampling_distribution(
    student_server: ServerProcess, reference, temperature: float, top_p: float
):
    """One batch holds all supports."""
    requests = [
        RolloutRequest(
            exact=True,
            rid=f"support-{temperature}-{top_p}-{num_atoms}-{num_draws}-{thin}",
            input_ids=[*PROMPT, 2 + i],
            max_new_tokens=24,
            temperature=temperature,
            top_p=top_p,
            num_atoms=num_atoms,
            num_draws=num_draws,
            thin=thin,
            record=True,
        )
        for i, (num_atoms, num_draws, thin) in enumerate(SUPPORTS)
    ]
    for request, reply in zip(
        requests, generate_all(student_server.spec.url, requests), strict=True
    ):
        prompt = len(request.input_ids)
        logits = reference_logits(reference, [*request.input_ids, *reply.output_ids_T.tolist()])
        nats, relative = worst_errors(logits[prompt - 1 : -1], reply, request)
        bounded("draws: log-probs against transformers (nats)", nats, TOLERANCE, request.rid)
        bounded("draws: weights against transformers (relative)", relative, 5e-5, request.rid)
        # One row off must not pass, or this test sees nothing.
        shifted, unlike = worst_errors(logits[prompt - 2 : -2], reply, request)
        assert shifted > 0.1
        assert unlike > 1e-2 or request.num_atoms == 0
        if (request.num_atoms, top_p) == (VOCAB_SIZE, 1.0):
            assert len(reply.draws.ids_N) == VOCAB_SIZE * len(reply.output_ids_T)


def test_turns_are_of_the_distribution_behind_the_whole_sequence(
    student_server: ServerProcess, reference
):
    """Four trajectories at once, each of four turns, which go on from cached prefixes."""
    rng = np.random.default_rng(11)
    turn = RolloutRequest(
        rid="",
        input_ids=PROMPT,
        max_new_tokens=16,
        num_atoms=4,
        num_draws=8,
        exact=True,
        record=True,
    )

    async def trajectory(client: ServerClient, number: int) -> list[tuple]:
        ids, found = [*PROMPT, 100 + number], []
        for turns in range(4):
            asked = replace(turn, rid=f"turn-{number}-{turns}", input_ids=list(ids))
            reply = await client.generate(asked)
            found.append((asked, reply))
            ids += reply.output_ids_T.tolist()
            ids += rng.integers(2, VOCAB_SIZE, 5 + 9 * number).tolist()  # what a tool says
        return found

    async def run() -> list[list[tuple]]:
        async with ServerClient(student_server.spec.url, timeout_s=120) as client:
            return await asyncio.gather(*(trajectory(client, number) for number in range(4)))

    for turns in asyncio.run(run()):
        last, end = turns[-1]
        logits = reference_logits(reference, [*last.input_ids, *end.output_ids_T.tolist()])
        for asked, reply in turns:
            start = len(asked.input_ids)
            at = slice(start - 1, start - 1 + len(reply.output_ids_T))
            nats, relative = worst_errors(logits[at], reply, asked)
            bounded("draws: log-probs against transformers (nats)", nats, TOLERANCE, asked.rid)
            bounded("draws: weights against transformers (relative)", relative, 5e-5, asked.rid)
            # the mask of sampled tokens, shifted by one position
            shifted, _ = worst_errors(logits[at.start - 1 : at.stop - 1], reply, asked)
            assert shifted > 0.1
        assert all(
            reply.cached_tokens >= len(before.input_ids)
            for (before, _), (_, reply) in pairwise(turns)
        ), "each turn goes on from the one before"


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_draws_follow_the_exact_distribution(
    student_server: ServerProcess, reference, temperature: float, top_p: float
):
    """Some 10k draws of one next-token distribution and of its tail: chi-square; none outside."""
    supports = [(0, 64)] * 200 + [(6, 64)] * 200 + [(0, 1)] * 200
    requests = [
        RolloutRequest(
            exact=True,
            rid=f"chi-{temperature}-{i}",
            input_ids=PROMPT,
            max_new_tokens=1,
            temperature=temperature,
            top_p=top_p,
            num_atoms=num_atoms,
            num_draws=num_draws,
        )
        for i, (num_atoms, num_draws) in enumerate(supports)
    ]
    probs_V = np.exp(behaviour_logp(reference_logits(reference, PROMPT)[-1], temperature, top_p))
    tail_V = probs_V.copy()
    tail_V[np.argsort(-probs_V)[:6]] = 0
    weight_2V, paths_V = np.zeros((2, len(probs_V))), np.zeros(len(probs_V))
    replies = generate_all(student_server.spec.url, requests)
    for request, reply in zip(requests, replies, strict=True):
        draws, hits_V = reply.draws, weight_2V[int(request.num_atoms > 0)]
        np.add.at(hits_V, draws.ids_N, draws.weight_N * request.num_draws)
        paths_V[reply.output_ids_T[0]] += 1
    tail_hits_V = np.where(tail_V > 0, weight_2V[1], 0) / tail_V.sum()
    bounded(
        "draws: chi-square from its mean (standard deviations)",
        deviations(weight_2V[0], probs_V),
        6,
    )
    bounded(
        "tail draws: chi-square from its mean (standard deviations)",
        deviations(tail_hits_V, tail_V / tail_V.sum()),
        6,
    )
    bounded(
        "path tokens: chi-square from its mean (standard deviations)",
        deviations(paths_V, probs_V),
        6,
    )


def test_thin_draws_are_few_and_unbiased(student_server: ServerProcess, reference):
    """300 rows of a distribution whose tail has about 1/6 of the mass: 12 of 64 draws each."""
    num_atoms, num_draws, temperature, count = 4, 64, 0.3, 300
    logp_V = behaviour_logp(reference_logits(reference, PROMPT)[-1], temperature)
    probs_V, atoms = np.exp(logp_V), np.argsort(-logp_V)[:num_atoms]
    (drawn,) = thin_draws(logp_V, num_atoms, num_draws)
    assert drawn < num_draws / 4, "else nothing is thin"
    requests = [
        RolloutRequest(
            exact=True,
            rid=f"thin-{i}",
            input_ids=PROMPT,
            max_new_tokens=1,
            temperature=temperature,
            num_atoms=num_atoms,
            num_draws=num_draws,
            thin=True,
        )
        for i in range(count)
    ]
    mean_V, mass = np.zeros(len(probs_V)), []
    for request, reply in zip(
        requests, generate_all(student_server.spec.url, requests), strict=True
    ):
        ids, weight = reply.draws.ids_N, reply.draws.weight_N.astype(np.float64)
        error = selection_error(logp_V, ids, weight, num_atoms, drawn)
        bounded("draws: weights against transformers (relative)", error, 5e-5, request.rid)
        np.add.at(mean_V, ids, weight / count)
        mass.append(weight.sum())
    bounded("thin rows: mean of the weights' sum - 1", abs(np.mean(mass) - 1), 1e-6)
    tail_V = probs_V.copy()
    tail_V[atoms] = 0
    hits_V = np.where(tail_V > 0, mean_V, 0) / tail_V.sum() * drawn * count
    bounded(
        "thin draws: chi-square from its mean (standard deviations)",
        deviations(hits_V, tail_V / tail_V.sum()),
        6,
    )


def deviations(counts_V: np.ndarray, probs_V: np.ndarray) -> float:
    """|chi-square / df - 1| in its standard deviations."""
    ratio, df = chi_square_per_df(counts_V, probs_V)
    return abs(ratio - 1) / (2 / df) ** 0.5


@pytest.mark.parametrize("num_atoms", [0, 4])
def test_greedy_draws_are_the_argmax(student_server: ServerProcess, reference, num_atoms: int):
    """One id has all the mass: it is the only atom, and there is no tail to draw from."""
    request = RolloutRequest(
        exact=True,
        rid=f"greedy-{num_atoms}",
        input_ids=PROMPT,
        max_new_tokens=8,
        temperature=0.0,
        num_atoms=num_atoms,
        num_draws=16,
    )
    (reply,) = generate_all(student_server.spec.url, [request])
    logits = reference_logits(reference, [*PROMPT, *reply.output_ids_T.tolist()])
    assert reply.output_ids_T.tolist() == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert reply.draws.ids_N.tolist() == reply.output_ids_T.tolist()
    assert (reply.draws.weight_N == 1).all()
    assert np.abs(reply.draws.sampler_logp_N).max() < TOLERANCE


def test_plain_generation_has_no_draws_and_keeps_its_versions(student_server: ServerProcess):
    request = RolloutRequest(
        exact=True, rid="plain", input_ids=PROMPT, max_new_tokens=5, temperature=0.0
    )
    (reply,) = generate_all(student_server.spec.url, [request])
    assert reply.draws is None
    assert len(reply.output_ids_T) == 5
    assert reply.finish_reason == "length"
    assert [(start, stop) for _, start, stop in reply.spans] == [(0, 5)]


def test_stop_token_ends_the_response_and_is_part_of_it(student_server: ServerProcess):
    longer = RolloutRequest(
        exact=True,
        rid="before-stop",
        input_ids=PROMPT,
        max_new_tokens=6,
        temperature=0.0,
        num_draws=4,
    )
    (reply,) = generate_all(student_server.spec.url, [longer])
    stop = int(reply.output_ids_T[3])
    first = reply.output_ids_T.tolist().index(stop)
    request = RolloutRequest(
        exact=True,
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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"regex": "[ab]*", "custom_params": {"bridge_num_draws": 4, "bridge_packed": True}},
            "be combined with regex",
        ),
        (
            {"custom_params": {"bridge_num_draws": 4}},
            "answered by /bridge/generate and /bridge/score",
        ),
        (
            {
                "custom_params": {
                    "bridge_num_draws": 0,
                    "bridge_num_atoms": VOCAB_SIZE + 1,
                    "bridge_packed": True,
                }
            },
            f"num_atoms must be at most the vocabulary, {VOCAB_SIZE}, got {VOCAB_SIZE + 1}",
        ),
    ],
)
def test_impossible_draws_are_refused(student_server: ServerProcess, params: dict, message: str):
    """A grammar, say, masks the logits after the observer saw them: the draws would be wrong."""

    async def run() -> None:
        async with ServerClient(student_server.spec.url, timeout_s=30) as client:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, **params}}
            await client._http.request("POST", "/generate", body)

    with pytest.raises(ServerRefused, match=message):
        asyncio.run(run())


def test_two_bytes_a_log_prob_are_near_four(student_server: ServerProcess):
    """By one seed both requests have the same path, and likeliest ids are not drawn."""
    asked = [
        RolloutRequest(
            rid=f"width-{exact}.",
            input_ids=PROMPT,
            max_new_tokens=12,
            seed=7,
            num_atoms=16,
            exact=exact,
        )
        for exact in (True, False)
    ]
    exact, narrow = (generate_all(student_server.spec.url, [each])[0] for each in asked)
    assert exact.output_ids_T.tolist() == narrow.output_ids_T.tolist()
    np.testing.assert_array_equal(exact.draws.ids_N, narrow.draws.ids_N)
    wide_N, narrow_N = exact.draws.sampler_logp_N, narrow.draws.sampler_logp_N
    path = exact.draws.path_T
    bounded("two bytes: the path's log-probs (nats)", np.abs(wide_N - narrow_N)[path].max(), 1e-6)
    error = np.abs(wide_N - narrow_N).max() / -wide_N.min() * 65535
    bounded("two bytes: log-probs (steps of the lowest)", error, 1.05)
    assert (wide_N != narrow_N).any(), "nothing was narrowed: the check shows nothing"
