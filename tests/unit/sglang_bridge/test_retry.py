"""How often a server is asked: `attempts` times in all, whatever the number of servers."""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from megatron_opd.buffer.rejection import RolloutRejected, ScoreRejected
from megatron_opd.config.servers import ServerConfig
from megatron_opd.evaluation.ports import FleetPort
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.records.types import VersionSpan
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.sim.clock import run_virtual
from sglang_bridge import members, retry, wire
from sglang_bridge.errors import ServerRefused, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.retry import (
    VERDICT_S,
    Backoff,
    is_lost_connection,
    is_unserved,
    retried,
)
from tests.support.bridge_replies import FakeServer, Handler, answering, breaking
from tests.support.config_files import minimal
from tests.support.fakes import make_prompt, make_rollout

ROLLOUT = make_rollout(make_prompt(5), (VersionSpan(0, 0, 3),))
BROKEN, BUSY = breaking(10**9, answering({})), answering({"message": "busy"}, 503)
WRONG = answering({"message": "no such field"}, 400)
Work = Callable[[Fleet, int], Awaitable[object]]


def score(fleet: Fleet, attempts: int) -> Awaitable[object]:
    config = minimal(scoring={"attempts": attempts})
    return FleetScorer(config, {"teacher": fleet}, 50, "run").score(ROLLOUT)


def sample(fleet: Fleet, attempts: int) -> Awaitable[object]:
    generator = RolloutGenerator(minimal(rollout={"attempts": attempts}), fleet, 50, "run", ())
    return generator.generate(make_prompt(5))


def evaluate(fleet: Fleet, attempts: int) -> Awaitable[object]:
    port = FleetPort(fleet, attempts, end_ids=(1,))
    return port.complete([1, 2], max_new_tokens=3, temperature=1.0, stop=(), seed=0)


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(members, "REST_S", 0.7)
    if "servers" in request.fixturenames:  # over real sockets
        monkeypatch.setattr(retry, "VERDICT_S", 0.1)


def tries(work: Work, attempts: int, handlers: Sequence[Handler], error: type) -> list[int]:
    """How often each of some servers was asked, until `error` was raised."""

    async def run() -> list[int]:
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(FakeServer({wire.WORK_ROUTE: handler}))
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
    [(score, ScoreRejected), (sample, RolloutRejected), (evaluate, ServerUnreachable)],
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


@pytest.mark.parametrize(
    ("work", "error"),
    [(score, ScoreRejected), (sample, RolloutRejected), (evaluate, ServerRefused)],
)
def test_an_overloaded_server_is_asked_as_often(work: Work, error: type):
    assert sum(tries(work, 3, [BUSY, BUSY], error)) == 3


@pytest.mark.parametrize(
    ("work", "error"),
    [(score, ScoreRejected), (sample, ServerRefused), (evaluate, ServerRefused)],
)
def test_what_is_refused_for_good_is_not_asked_for_again(work: Work, error: type):
    assert sum(tries(work, 3, [WRONG, WRONG], error)) == 1


def lost(cause: str, *, gone: bool) -> ServerUnreachable:
    """A request whose server is out of the fleet, or still there. Inside a loop only."""
    error = ServerUnreachable("http://a:1", "", cause, sent=True)
    error.gone = asyncio.Event()
    if gone:
        error.gone.set()
    return error


def test_a_failed_try_keeps_its_request_no_longer():
    """Before: the tracebacks of all failed tries, and so all that they had sent, until the last."""

    class Body:
        pass

    sent: list[weakref.ref[Body]] = []

    async def call(earlier: int) -> list[Body | None]:
        if earlier:
            return [reference() for reference in sent]
        body = Body()
        sent.append(weakref.ref(body))
        raise lost("reset", gone=False)

    async def scenario() -> list[Body | None]:
        return await retried(call, Backoff(2), is_unserved)

    assert run_virtual(scenario()) == [None]


def test_a_server_that_is_taken_out_soon_after_its_connections_broke_does_not_count():
    """Before: three servers that failed in the second before they were taken out ended a run."""

    async def scenario() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        failures = [lost(str(i), gone=False) for i in range(3)]
        for error in failures:
            assert error.gone is not None
            loop.call_later(VERDICT_S - 0.5, error.gone.set)

        async def call(earlier: int) -> str:
            if earlier < 3:
                raise failures[earlier]
            return "done"

        began_s = loop.time()
        return await retried(call, Backoff(3), is_unserved), loop.time() - began_s

    done, took_s = run_virtual(scenario())
    assert done == "done"
    assert took_s < VERDICT_S + 2


def test_a_request_that_stalls_counts_also_where_its_server_is_taken_out():
    """Else one prompt that no server can sample would be tried until no server is left."""
    asked: list[int] = []

    async def scenario() -> None:
        async def call(earlier: int) -> str:
            asked.append(earlier)
            error = ServerUnreachable("http://a:1", "", "idle", sent=True, stalled=True)
            error.gone = asyncio.Event()
            error.gone.set()
            raise error

        with pytest.raises(ServerUnreachable, match="idle"):
            await retried(call, Backoff(3), is_unserved)

    run_virtual(scenario())
    assert asked == [0, 1, 2]


def test_a_server_that_stays_counts_after_the_verdict():
    async def scenario() -> None:
        async def call(_: int) -> str:
            raise lost("reset", gone=False)

        with pytest.raises(ServerUnreachable, match="reset"):
            await retried(call, Backoff(3), is_unserved)

    run_virtual(scenario())


def test_tries_whose_server_was_taken_out_do_not_count():
    """So often as servers are lost, which the supervisor bounds."""
    names: list[int] = []

    async def call(earlier: int) -> str:
        names.append(earlier)
        if earlier < 9:
            raise lost("taken out", gone=True)
        if earlier < 10:
            raise ServerUnreachable("http://a:1", "", "reset", sent=True)
        return "done"

    backoff = Backoff(2, first_wait_s=0.0, max_wait_s=0.0)
    assert asyncio.run(retried(call, backoff, is_lost_connection)) == "done"
    assert names == list(range(11)), "every try has a name of its own"
    with pytest.raises(ServerUnreachable, match="reset"):
        asyncio.run(retried(call, Backoff(1, 0.0, 0.0), is_lost_connection))
