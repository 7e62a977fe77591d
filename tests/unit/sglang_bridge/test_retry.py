"""How often a server is asked: `attempts` times in all, whatever the number of servers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.cli.wiring import make_fleet
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.sections import RolloutConfig, ScoringConfig
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.supports import McSupport
from megatron_opd.evaluation import FleetPort
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.teacher.scorer import FleetScorer
from megatron_opd.types import VersionSpan
from sglang_bridge import members
from sglang_bridge.errors import ServerRefused, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.retry import Backoff, is_lost_connection, retried
from tests.support.bridge_replies import FakeServer, Handler, answering, breaking
from tests.support.fakes import make_prompt, make_rollout

ROLLOUT = make_rollout(make_prompt(5), (VersionSpan(0, 0, 3),))
BROKEN, BUSY = breaking(10**9, answering({})), answering({"message": "busy"}, 503)
Work = Callable[[Fleet, int], Awaitable[object]]


def score(fleet: Fleet, attempts: int) -> Awaitable[object]:
    estimator, settings = Estimator.model_validate({}), ScoringConfig(attempts=attempts)
    return FleetScorer({"teacher": fleet}, estimator, 50, settings, "run").score(ROLLOUT)


def sample(fleet: Fleet, attempts: int) -> Awaitable[object]:
    settings = RolloutConfig(attempts=attempts)
    generator = RolloutGenerator(fleet, settings, McSupport(m=4), 50, "run")
    return generator.generate(make_prompt(5))


def evaluate(fleet: Fleet, attempts: int) -> Awaitable[object]:
    port = FleetPort(fleet, attempts)
    return port.complete([1, 2], max_new_tokens=3, temperature=1.0, seed=0)


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "REST_S", 0.7)


def tries(work: Work, attempts: int, handlers: Sequence[Handler], error: type) -> list[int]:
    """How often each of some servers was asked, until `error` was raised."""

    async def run() -> list[int]:
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(FakeServer({"/generate": handler}))
                for handler in handlers
            ]
            fleet = make_fleet(ServerConfig(model="m"), [server.url for server in servers])
            try:
                with pytest.raises(error):
                    await work(fleet, attempts)
            finally:
                await fleet.close()
            return [len(server.seen) for server in servers]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("work", "error"),
    [(score, ScoreRejected), (sample, ServerUnreachable), (evaluate, ServerUnreachable)],
)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("attempts", [1, 3])
def test_attempts_count_every_try_over_all_servers(
    work: Work, error: type, servers: int, attempts: int
):
    seen = tries(work, attempts, [BROKEN] * servers, error)
    assert sum(seen) == attempts
    if servers >= attempts:
        assert max(seen) == 1, "a repeat goes to another server"


def test_an_overloaded_teacher_is_asked_as_often():
    assert sum(tries(score, 3, [BUSY, BUSY], ScoreRejected)) == 3


def test_a_refused_sample_is_not_asked_for_again():
    assert sum(tries(sample, 3, [BUSY, BUSY], ServerRefused)) == 1


def test_tries_whose_server_was_taken_out_do_not_count():
    """So often as servers are lost, which the supervisor bounds."""
    names: list[int] = []

    async def call(earlier: int) -> str:
        names.append(earlier)
        if earlier < 9:
            raise ServerUnreachable("http://a:1", "", "taken out", sent=True, taken_out=True)
        if earlier < 10:
            raise ServerUnreachable("http://a:1", "", "reset", sent=True)
        return "done"

    backoff = Backoff(2, first_wait_s=0.0, max_wait_s=0.0)
    assert asyncio.run(retried(call, backoff, is_lost_connection)) == "done"
    assert names == list(range(11)), "every try has a name of its own"
    with pytest.raises(ServerUnreachable, match="reset"):
        asyncio.run(retried(call, Backoff(1, 0.0, 0.0), is_lost_connection))
