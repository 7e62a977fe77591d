"""Teacher scores of ragged per-position ids against transformers, however prompts are split."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerRefused
from sglang_bridge.http import HttpConnection
from sglang_bridge.protocol import RolloutRequest, ScoreReply, ScoreRequest
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.replies import SCORES, TOLERANCE, check_selection, expected_scores, ragged_request
from tests.support.figures import bounded
from tests.support.models import VOCAB_SIZE
from tests.support.oracles import chi_square_per_df, load_reference, log_softmax, reference_logits

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def reference(teacher_model: Path):
    return load_reference(teacher_model)


def score_all(url: str, requests: list[ScoreRequest]) -> list[np.ndarray]:
    async def run() -> list[np.ndarray]:
        async with ServerClient(url, timeout_s=120) as client:
            replies = await asyncio.gather(*map(client.score, requests))
        return [reply.logp_N for reply in replies]

    return asyncio.run(run())


def test_ragged_scores_under_chunked_prefill_and_cache_hits(
    teacher_server: ServerProcess, reference
):
    """Prompts of up to 8 chunks of 32, concurrently; then again, with their prefixes cached."""
    shapes = [(1, 1), (1, 90), (31, 33), (32, 32), (33, 64), (100, 7), (150, 110), (5, 28)]
    requests = [ragged_request(f"s{i}", p, t, seed=i) for i, (p, t) in enumerate(shapes)]
    for _ in range(2):
        for request, scores in zip(
            requests, score_all(teacher_server.spec.url, requests), strict=True
        ):
            error = np.abs(scores - expected_scores(reference, request)).max(initial=0)
            bounded(SCORES, error, TOLERANCE, request.rid)


# (prompt, response, and what follows it, given and sampled in turn): gaps of more than two chunks
# of 32 and of one id, a run that begins where a chunk does, one of a single id, and none between
TURNS = [
    (40, 12, (70, 9, 1, 20)),
    (1, 31, (33, 31, 90, 1)),
    (16, 16, (32, 40)),
    (50, 5, (0, 8, 30, 6)),
]


def multi_run_requests(rid: str) -> list[ScoreRequest]:
    return [
        ragged_request(f"{rid}{i}", prompt, response, 400 + i, more)
        for i, (prompt, response, more) in enumerate(TURNS)
    ]


def test_several_runs_under_chunked_prefill_and_cache_hits(
    teacher_server: ServerProcess, reference
):
    """At once, half of them with a selection; then again, with what precedes each run cached."""
    requests = multi_run_requests("turns")
    requests[::2] = [replace(each, num_atoms=6, num_draws=8) for each in requests[::2]]
    # before anything else: a sequence that ends in the given ids before the last run
    prefix = list(requests[0].input_ids[: requests[0].runs[-1][0] + 3])
    cached = RolloutRequest(rid="prefix", input_ids=prefix, max_new_tokens=1)

    async def run() -> list[ScoreReply]:
        async with ServerClient(teacher_server.spec.url, timeout_s=120) as client:
            await client.generate(cached)
            return await asyncio.gather(*map(client.score, requests))

    for _ in range(2):
        for request, reply in zip(requests, asyncio.run(run()), strict=True):
            error = np.abs(reply.logp_N - expected_scores(reference, request)).max()
            bounded(SCORES, error, TOLERANCE, request.rid)
            shifted = expected_scores(reference, request, shift=-1)
            assert np.abs(reply.logp_N - shifted).max() > 0.5, "a run's neighbour scores the same"
            if request.selects:
                check_selection(reference, request, reply)


def test_how_sampled_ids_are_cut_into_runs_leaves_every_bit(teacher_server: ServerProcess):
    """Each alone on the server: the same rows are computed in passes of the same sizes."""
    whole = ragged_request("whole", 20, 60, seed=9)
    cut = replace(whole, rid="cut", runs=((20, 33), (33, 34), (34, 80)))
    # the first one leaves the prompt in the cache, which the others compute from
    _, *found = [score_all(teacher_server.spec.url, [each]) for each in (whole, whole, cut)]
    assert np.array_equal(*found)


# (atoms, draws, temperature) of q's own ids; the last selects nothing
SELECTIONS = [
    (8, 8, 1.0),
    (16, 4, 0.7),
    (0, 16, 0.7),
    (5, 0, 1.3),
    (VOCAB_SIZE, 0, 1.0),
    (0, 0, 0.7),
]


def test_selections_under_chunked_prefill_and_cache_hits(teacher_server: ServerProcess, reference):
    """Every support at once, tempered or not, over up to 5 chunks of 32; then prefixes cached."""
    requests = [
        replace(
            ragged_request(f"select{i}", 20 + 9 * i, 40 + 12 * i, seed=300 + i),
            num_atoms=num_atoms,
            num_draws=num_draws,
            temperature=temperature,
        )
        for i, (num_atoms, num_draws, temperature) in enumerate(SELECTIONS)
    ]

    async def run() -> list[ScoreReply]:
        async with ServerClient(teacher_server.spec.url, timeout_s=120) as client:
            return await asyncio.gather(*map(client.score, requests))

    for _ in range(2):
        for request, reply in zip(requests, asyncio.run(run()), strict=True):
            error = np.abs(reply.logp_N - expected_scores(reference, request)).max()
            bounded(SCORES, error, TOLERANCE, request.rid)
            assert (reply.selection is not None) == request.selects
            if request.selects:
                check_selection(reference, request, reply)


def test_teacher_draws_follow_q(teacher_server: ServerProcess, reference):
    """The tail draws of 150 requests at one position: chi-square."""
    prompt, temperature = list(range(30, 50)), 0.7
    requests = [
        ScoreRequest(
            exact=True,
            rid=f"q{i}",
            input_ids=[*prompt, 7],
            runs=((len(prompt), len(prompt) + 1),),
            offsets_T1=np.zeros(2, np.int64),
            ids_N=np.empty(0, np.int32),
            temperature=temperature,
            num_atoms=4,
            num_draws=64,
        )
        for i in range(150)
    ]

    async def run() -> list[ScoreReply]:
        async with ServerClient(teacher_server.spec.url, timeout_s=120) as client:
            return await asyncio.gather(*map(client.score, requests))

    tail_V = np.exp(log_softmax(reference_logits(reference, prompt)[-1] / temperature))
    tail_V[np.argsort(-tail_V)[:4]] = 0
    hits_V = np.zeros(len(tail_V))
    for reply in asyncio.run(run()):
        rows = reply.selection
        np.add.at(hits_V, rows.ids_N, np.where(tail_V[rows.ids_N] > 0, rows.weight_N, 0))
    ratio, df = chi_square_per_df(hits_V * 64 / tail_V.sum(), tail_V / tail_V.sum())
    error = abs(ratio - 1) / (2 / df) ** 0.5
    bounded("teacher draws: chi-square from its mean (standard deviations)", error, 6)


def test_one_row_shift_is_seen(teacher_server: ServerProcess, reference):
    """Of the rows, and of the runs in the request: each run by one id to the left."""
    request = ragged_request("shift", 20, 30, 99, more=(40, 10))
    moved = tuple((start - 1, stop - 1) for start, stop in request.runs)
    asked = replace(request, input_ids=list(request.input_ids)[:-1], runs=moved)
    scores, others = score_all(teacher_server.spec.url, [request, asked])
    assert np.abs(scores - expected_scores(reference, request, shift=1)).max() > 0.5
    assert np.abs(others - expected_scores(reference, request)).max() > 0.5


def test_scores_beside_generation(teacher_server: ServerProcess, reference):
    """Scoring, selecting and sampling with draws share batches without mixing up their rows."""
    scored = [ragged_request(f"mixed{i}", 10 + i, 40, seed=200 + i) for i in range(12)]
    scored[::2] = [replace(request, num_atoms=3, num_draws=4) for request in scored[::2]]
    scored += multi_run_requests("beside")
    sampled = [
        RolloutRequest(
            exact=True,
            rid=f"beside{i}",
            input_ids=list(range(2, 40)),
            max_new_tokens=30,
            num_draws=8,
        )
        for i in range(6)
    ]

    async def run():
        async with ServerClient(teacher_server.spec.url, timeout_s=120) as client:
            work = [*map(client.generate, sampled), *map(client.score, scored)]
            return await asyncio.gather(*work)

    replies = asyncio.run(run())
    for reply in replies[: len(sampled)]:
        logits = reference_logits(reference, [*range(2, 40), *reply.output_ids_T.tolist()])
        logp = log_softmax(logits[37:-1])
        row_N = np.repeat(np.arange(len(reply.output_ids_T)), np.diff(reply.draws.offsets_T1))
        assert np.abs(logp[row_N, reply.draws.ids_N] - reply.draws.sampler_logp_N).max() < TOLERANCE
    for request, reply in zip(scored, replies[len(sampled) :], strict=True):
        error = np.abs(reply.logp_N - expected_scores(reference, request)).max()
        bounded(SCORES, error, TOLERANCE, request.rid)
        if request.selects:
            check_selection(reference, request, reply)


def test_sglangs_own_log_probs_beside_scores(teacher_server: ServerProcess, reference):
    """They share a pass: all wait behind 17 chunks of 32, and together are shorter than one."""
    long = ragged_request("long", 400, 144, seed=500)
    scored = [ragged_request(f"own{i}", 1, 2, 501 + i, more=(3, 1)) for i in range(3)]
    ids = [7, 300, 41, 9, 123, 60]
    asked = {
        "input_ids": ids,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 1},
    }

    async def run():
        http = HttpConnection(teacher_server.spec.url, timeout_s=60)
        async with ServerClient(teacher_server.spec.url, timeout_s=60) as client:
            before = await client.work()
            other = http.request("POST", "/generate", asked, max_bytes=1 << 20)
            *replies, answer = await asyncio.gather(*map(client.score, [long, *scored]), other)
            passes, requests = (await client.work()).since(before).prefill.gram[:2]
        await http.close()
        return replies, answer["meta_info"], requests - passes

    replies, meta, shared = asyncio.run(run())
    assert shared > 0
    for request, reply in zip([long, *scored], replies, strict=True):
        error = np.abs(reply.logp_N - expected_scores(reference, request)).max()
        bounded(SCORES, error, TOLERANCE, request.rid)
    logp = log_softmax(reference_logits(reference, ids))[:-1]
    own = [value for value, _, _ in meta["input_token_logprobs"][1:]]
    assert np.abs(own - logp[np.arange(5), ids[1:]]).max() < TOLERANCE
    top = [[value for value, _, _ in row] for row in meta["input_top_logprobs"][1:]]
    assert np.abs(top - np.sort(logp)[:, :-3:-1]).max() < TOLERANCE


def test_ids_outside_the_vocabulary_are_refused(teacher_server: ServerProcess):
    request = ScoreRequest(
        exact=True,
        rid="outside",
        input_ids=[5, 6, 7],
        runs=((2, 3),),
        offsets_T1=np.array([0, 1]),
        ids_N=np.array([VOCAB_SIZE], np.int32),
    )
    with pytest.raises(ServerRefused, match="ids to score must be in"):
        score_all(teacher_server.spec.url, [request])
