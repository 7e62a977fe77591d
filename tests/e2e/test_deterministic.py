"""A deterministic server gives a request the same bits, whatever is served beside it.

Two ranks that split heads, vocabulary and experts: what could add in another order does.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import pytest

from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import RolloutRequest, ScoreRequest
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.workers import EXIT_WORKER_DIED
from tests.e2e.conftest import left_behind, running, tiny_spec
from tests.support.models import tiny_glm4_moe

pytestmark = pytest.mark.e2e

VOCAB, TOKENS = 90, 16
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(2, VOCAB, size=size).tolist() for size in (1, 2, 5, 9, 20, 31, 33, 50)]
# three responses of the same prompt, as evaluation and groups ask for them
PROMPTS += [PROMPTS[4]] * 2
ALL = range(len(PROMPTS))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of GLM-4.5: its routers' sigmoids are of fewer experts than a vector has numbers."""
    base = tmp_path_factory.mktemp("deterministic")
    flags = {"tp": 2, "ep": 2, "deterministic": True, "routed_experts": True}
    spec = tiny_spec(tiny_glm4_moe(base / "model", seed=3), "student", **flags)
    with running(spec, base / "log") as process:
        yield process


async def sampled(client: ServerClient, index: int, top_p: float = 1.0, seed: int = 0) -> bytes:
    """Everything that a rollout returned."""
    request = RolloutRequest(
        exact=True,
        rid=f"{index}-{np.random.default_rng().integers(2**62)}",
        input_ids=PROMPTS[index],
        max_new_tokens=TOKENS,
        temperature=0.9,
        top_p=top_p,
        num_atoms=index % 3,
        num_draws=8,
        experts=True,
        seed=seed + index,
    )
    reply = await client.generate(request)
    draws = reply.draws
    assert draws is not None
    assert reply.experts_XLk is not None
    arrays = (draws.offsets_T1, draws.ids_N, draws.weight_N, draws.sampler_logp_N)
    everything = (reply.output_ids_T, reply.experts_XLk, *arrays)
    return b"|".join(array.tobytes() for array in everything)


async def scored(client: ServerClient, index: int, seed: int = 0) -> bytes:
    """Everything that a score of two runs returned, the server's own ids among it."""
    ids = PROMPTS[index] + list(range(2, 26))
    first = len(PROMPTS[index])
    request = ScoreRequest(
        exact=True,
        rid="",
        input_ids=ids,
        runs=((first, first + 8), (first + 12, first + 24)),
        offsets_T1=np.arange(21) * 2,
        ids_N=np.tile(np.array([3, 60], np.int32), 20),
        num_draws=4,
        seed=seed + index,
    )
    reply = await client.score(request)
    chosen = reply.selection
    assert chosen is not None
    arrays = (reply.logp_N, chosen.offsets_T1, chosen.ids_N, chosen.weight_N, chosen.logp_N)
    return b"|".join(array.tobytes() for array in arrays)


async def every_way(url: str) -> list[list[bytes]]:
    """The same requests one by one, all at once, and a few at a time in another order."""
    client = ServerClient(url, timeout_s=300)

    async def one(index: int) -> bytes:
        return await sampled(client, index) + await scored(client, index)

    async def at_most(limit: int, order: Sequence[int]) -> list[bytes]:
        slots = asyncio.Semaphore(limit)

        async def when_free(index: int) -> bytes:
            async with slots:
                return await one(index)

        found = await asyncio.gather(*map(when_free, order))
        return [found[list(order).index(index)] for index in ALL]

    try:
        info = await client.info()
        assert info.deterministic
        return [
            await at_most(1, ALL),
            await at_most(len(ALL), ALL),
            await at_most(3, RANDOM.permutation(len(ALL)).tolist()),
        ]
    finally:
        await client.close()


def test_the_same_bits_whatever_is_beside_it(server: ServerProcess):
    alone, together, mixed = asyncio.run(every_way(server.spec.url))
    assert len(set(alone)) == len(PROMPTS), "each seed samples on its own"
    assert together == alone
    assert mixed == alone


def test_another_seed_samples_anew_and_truncation_is_seeded_too(server: ServerProcess):
    """Not in one batch: SGLang sorts a batch's rows as soon as one of them is to be truncated."""

    async def ask() -> list[bytes]:
        client = ServerClient(server.spec.url, timeout_s=300)
        try:
            plain = [sampled(client, 6), sampled(client, 6), sampled(client, 6, seed=100)]
            cut = [sampled(client, 6, top_p=0.7) for _ in range(2)]
            scores = [scored(client, 6), scored(client, 6, seed=100)]
            return [
                *await asyncio.gather(*plain),
                *await asyncio.gather(*cut),
                *await asyncio.gather(*scores),
            ]
        finally:
            await client.close()

    plain, again, other, cut, cut_again, score, other_score = asyncio.run(ask())
    assert plain == again
    assert cut == cut_again
    assert len({plain, cut, other}) == 3
    assert score != other_score


def test_a_server_whose_worker_was_killed_ends_and_names_it(server: ServerProcess):
    """Last of this module: it ends the server."""
    victim = "detokenizer"
    others = tempfile.mkdtemp(prefix="opd-server-")
    files = left_behind(server)
    (worker,) = [child for child in psutil.Process(server.pid).children() if victim in child.name()]
    worker.kill()
    deadline_s = time.monotonic() + 10
    while server.is_running() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert server.exit_code() == EXIT_WORKER_DIED
    assert server.cause() == f"{victim} (pid {worker.pid}) ended with signal 9"
    server.stop(grace_s=1)
    assert server.cause() in server.log_path.read_text()
    assert [path for path in files if os.path.exists(path)] == []
    assert os.path.isdir(others), "another server's files stay"
    os.rmdir(others)
