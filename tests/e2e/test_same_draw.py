"""A server samples a seeded request as it sampled it before, whatever is served beside it."""

import asyncio

import numpy as np
import pytest

from megatron_opd.rollout.generator import RolloutGenerator
from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import RolloutRequest
from sglang_bridge.retry import Backoff
from sglang_bridge.server.launch import ServerProcess
from tests.support.breaking_proxy import BreakingProxy
from tests.support.config_files import minimal
from tests.support.fakes import make_prompt
from tests.support.models import VOCAB_SIZE

pytestmark = pytest.mark.e2e

TOKENS, PROMPTS = 48, 40
STOPS = tuple(range(2, VOCAB_SIZE, 12))  # of random weights: about every twelfth token
RATE = 0.04
NAMES = np.random.default_rng()


def request(number: int, seed: int | None, **options: float) -> RolloutRequest:
    return RolloutRequest(
        exact=True,
        rid=f"{number}-{NAMES.integers(2**62)}.",
        input_ids=[5 + number, 9, 11],
        max_new_tokens=TOKENS,
        seed=seed,
        **options,  # type: ignore[arg-type]
    )


def ask(url: str, requests: list[RolloutRequest]) -> list[list[int]]:
    """The ids of each, all sent at once."""

    async def run() -> list[list[int]]:
        async with ServerClient(url, timeout_s=120) as client:
            replies = await asyncio.gather(*map(client.generate, requests))
            return [reply.output_ids_T.tolist() for reply in replies]

    return asyncio.run(run())


def test_a_seeded_request_has_its_response_in_any_company(student_server: ServerProcess):
    """Beside seeded ones, ones without a seed, greedy ones, and ones whose sampling is cut."""
    url, seeds = student_server.spec.url, [7, 2**62 + 1, -(2**63)]
    alone = [ask(url, [request(i, seed)])[0] for i, seed in enumerate(seeds)]
    cut_alone = ask(url, [request(9, 4, top_p=0.7)])[0]
    company = [request(9, 4, top_p=0.7), request(3, None, temperature=0.0), request(0, 8)]
    company += [request(0, None), request(0, None)]
    mixed = ask(url, [*(request(i, seed) for i, seed in enumerate(seeds)), *company])
    assert mixed[:3] == alone
    assert mixed[3] == cut_alone
    assert mixed[4] == ask(url, [request(3, None, temperature=0.0)])[0]
    assert mixed[5] != alone[0], "another seed"
    assert mixed[6] != mixed[7], "no seed: each its own"
    assert ask(url, [request(0, None)]) != ask(url, [request(0, None)])


def sampled(url: str, *, seeded: bool = True) -> tuple[list[list[int]], int]:
    """(each prompt's ids, requests that were repeated) of a run's generator."""

    async def run() -> tuple[list[list[int]], int]:
        async with ServerClient(url, timeout_s=120) as client:
            await client.info()
            rollout = {"max_new_tokens": TOKENS, "seeded": seeded}
            config = minimal(rollout=rollout, support={"type": "mc", "m": 4})
            name = f"{NAMES.integers(2**62)}"
            generator = RolloutGenerator(config, client, VOCAB_SIZE, name, STOPS)
            generator._backoff = Backoff(1000, 0.0)
            rollouts = await asyncio.gather(
                *(generator.generate(make_prompt(uid)) for uid in range(PROMPTS))
            )
            ids = [rollout.response_ids_T.tolist() for rollout in rollouts]
            return ids, sum(rollout.restarts for rollout in rollouts)

    return asyncio.run(run())


def through_a_proxy(url: str, *, seeded: bool) -> tuple[list[list[int]], int]:
    """As `sampled`, where connections break."""

    async def run() -> tuple[list[list[int]], int]:
        async with BreakingProxy(url, RATE) as proxy:
            found = await asyncio.to_thread(sampled, proxy.url, seeded=seeded)
            assert found[1] == proxy.broken
            return found

    return asyncio.run(run())


def test_broken_connections_change_no_response(student_server: ServerProcess):
    """Paired by prompt; the control samples afresh after every break."""
    url = student_server.spec.url
    undisturbed, none = sampled(url)
    assert none == 0
    lengths = [len(ids) for ids in undisturbed]
    assert min(lengths) < 6
    assert max(lengths) > 24
    repeated, restarts = through_a_proxy(url, seeded=True)
    assert restarts > PROMPTS / 4
    assert repeated == undisturbed
    afresh, restarts = through_a_proxy(url, seeded=False)
    assert restarts > 0
    assert [len(ids) for ids in afresh] != lengths
