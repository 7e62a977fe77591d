"""Teacher scores of ragged per-position ids against transformers, however prompts are split."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from megatron_opd.records.mixtures import label_of
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Prompt, Sample, VersionSpan, sample_here
from megatron_opd.rollout.score_requests import TeacherAsk, asked_of
from megatron_opd.rollout.scorer import FleetScorer
from sglang_bridge.arrays import pack
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerRefused
from sglang_bridge.http import HttpConnection
from sglang_bridge.protocol import DrawCache, RolloutRequest, ScoreReply, ScoreRequest
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.replies import SCORES, TOLERANCE, check_selection, expected_scores, ragged_request
from tests.support.config_files import minimal
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


def of_teacher(request: ScoreRequest, own_Q: np.ndarray) -> ScoreRequest:
    """What a teacher is asked that reads a prompt of its own in front of the response."""
    ((start, stop),), ids_S = request.runs, np.array(request.input_ids, np.int32)
    unknown_N = np.zeros(len(request.ids_N), np.float32)
    draws = DrawCache(
        offsets_T1=request.offsets_T1,
        ids_N=request.ids_N,
        path_T=np.zeros(stop - start, np.int64),  # nothing here reads it
        weight_N=unknown_N,
        sampler_logp_N=unknown_N,
    )
    spans = (VersionSpan(0, 0, stop - start),)
    rollout = single_turn(Prompt(0, "", ids_S[:start]), ids_S[start:], draws, spans)
    ask = TeacherAsk(f"{request.rid}-own", 1.0, 0, 0, 7, VOCAB_SIZE, pack(own_Q))
    return replace(asked_of(rollout, ask), exact=True)


def test_a_teacher_reads_a_prompt_of_its_own(teacher_server: ServerProcess, reference):
    """Shorter and longer ones than the student's; controls: a row further, the student's prompt."""
    rng = np.random.default_rng(0)
    requests = [ragged_request(f"own{i}", 20 + i, 30, seed=800 + i) for i in range(5)]
    prompts = [rng.integers(2, VOCAB_SIZE, n).astype(np.int32) for n in (1, 20, 33, 64, 190)]
    found = score_all(teacher_server.spec.url, list(map(of_teacher, requests, prompts)))
    for request, own_Q, scores in zip(requests, prompts, found, strict=True):
        ((start, stop),) = request.runs
        read = replace(
            request,
            input_ids=[*own_Q.tolist(), *request.input_ids[start:]],
            runs=((len(own_Q), len(own_Q) + stop - start),),
        )
        error = np.abs(scores - expected_scores(reference, read)).max()
        bounded(SCORES, error, TOLERANCE, f"own prompt of {len(own_Q)}")
        for control in (expected_scores(reference, read, 1), expected_scores(reference, request)):
            assert np.abs(scores - control).max() > 0.1


def test_two_teachers_score_a_response_together(
    teacher_server: ServerProcess, student_server: ServerProcess, reference, student_model: Path
):
    """Their mixture in probabilities, of real servers and of transformers; control: in logs."""

    class Exact(ServerClient):
        async def score(self, request: ScoreRequest) -> ScoreReply:
            return await super().score(replace(request, exact=True))

    request = ragged_request("mixed", 20, 30, seed=810)
    unread_N = np.zeros(len(request.ids_N), np.float32)
    draws = DrawCache(
        offsets_T1=request.offsets_T1,
        ids_N=request.ids_N,
        path_T=np.minimum(request.offsets_T1[:-1], len(unread_N) - 1),  # not compared here
        weight_N=unread_N,
        sampler_logp_N=unread_N,
    )
    ids_S = np.array(request.input_ids, np.int32)
    shares = (("other", 0.3), ("teacher", 0.7))
    prompt = Prompt(0, "", ids_S[:20], teacher=label_of(shares), mixture=shares)
    rollout = single_turn(prompt, ids_S[20:], draws, (VersionSpan(0, 0, 30),))
    config = minimal(
        teachers={"other": {"model": "o"}}, scoring={"mixture": dict(shares), "temperature": 0.7}
    )

    async def run() -> Sample:
        async with (
            Exact(teacher_server.spec.url, timeout_s=120) as teacher,
            Exact(student_server.spec.url, timeout_s=120) as other,
        ):
            fleets = {"teacher": teacher, "teachers.other": other}
            return sample_here(await FleetScorer(config, fleets, VOCAB_SIZE, "mix").score(rollout))

    found_N = asyncio.run(run()).teacher_logp_N
    cooled = replace(request, temperature=0.7)
    first_N = expected_scores(load_reference(student_model), cooled)
    second_N = expected_scores(reference, cooled)
    mixed_N = np.log(0.3 * np.exp(first_N) + 0.7 * np.exp(second_N))
    bounded(SCORES, np.abs(found_N - mixed_N).max(), TOLERANCE, "mixture of two teachers")
    assert np.abs(found_N - (0.3 * first_N + 0.7 * second_N)).max() > 0.05


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
