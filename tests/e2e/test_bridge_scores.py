"""Teacher scores of ragged per-position ids against transformers, however prompts are split."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerRefused
from sglang_bridge.protocol import RolloutRequest, ScoreRequest
from sglang_bridge.server.launch import ServerProcess
from tests.figures import bounded
from tests.models import VOCAB_SIZE
from tests.oracles import load_reference, log_softmax, reference_logits

pytestmark = pytest.mark.e2e
SCORES = "teacher scores against transformers (nats)"
TOLERANCE = 1e-5


def ragged_request(rid: str, prompt: int, response: int, seed: int) -> ScoreRequest:
    """Random tokens; every response row has 0 to 65 random ids to score."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 66, size=response)
    ids = [np.sort(rng.choice(VOCAB_SIZE, size=n, replace=False)) for n in lengths]
    return ScoreRequest(
        rid=rid,
        input_ids=rng.integers(2, VOCAB_SIZE, size=prompt + response).tolist(),
        num_prompt_tokens=prompt,
        offsets_T1=np.concatenate([[0], np.cumsum(lengths)]),
        ids_N=np.concatenate(ids).astype(np.int32),
    )


def expected_scores(model, request: ScoreRequest, shift: int = 0) -> np.ndarray:
    logp = log_softmax(reference_logits(model, list(request.input_ids)))
    row_N = np.repeat(np.arange(request.num_tokens), np.diff(request.offsets_T1))
    return logp[request.num_prompt_tokens - 1 + row_N + shift, request.ids_N]


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


def test_one_row_shift_is_seen(teacher_server: ServerProcess, reference):
    request = ragged_request("shift", 20, 30, seed=99)
    (scores,) = score_all(teacher_server.spec.url, [request])
    assert np.abs(scores - expected_scores(reference, request, shift=1)).max() > 0.5


def test_scores_beside_generation(teacher_server: ServerProcess, reference):
    """Scoring and sampling with draws share batches without mixing up their rows."""
    scored = [ragged_request(f"mixed{i}", 10 + i, 40, seed=200 + i) for i in range(12)]
    sampled = [
        RolloutRequest(
            rid=f"beside{i}", input_ids=list(range(2, 40)), max_new_tokens=30, num_draws=8
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
        assert np.abs(logp[row_N, reply.draws.ids_N] - reply.draws.logp_N).max() < TOLERANCE
    for request, reply in zip(scored, replies[len(sampled) :], strict=True):
        error = np.abs(reply.logp_N - expected_scores(reference, request)).max()
        bounded(SCORES, error, TOLERANCE, request.rid)


def test_empty_response_needs_no_server():
    request = ScoreRequest(
        rid="empty",
        input_ids=[1, 2],
        num_prompt_tokens=2,
        offsets_T1=np.zeros(1, np.int64),
        ids_N=np.empty(0, np.int32),
    )
    (scores,) = score_all("http://127.0.0.1:9", [request])
    assert scores.shape == (0,)


def test_ids_outside_the_vocabulary_are_refused(teacher_server: ServerProcess):
    request = ScoreRequest(
        rid="outside",
        input_ids=[5, 6, 7],
        num_prompt_tokens=2,
        offsets_T1=np.array([0, 1]),
        ids_N=np.array([VOCAB_SIZE], np.int32),
    )
    with pytest.raises(ServerRefused, match="ids to score must be in"):
        score_all(teacher_server.spec.url, [request])
