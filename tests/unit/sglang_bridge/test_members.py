"""Who gets the next request: servers come and go, and some have no weights yet."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from megatron_opd.sim.clock import run_virtual
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.members import HUNG_AFTER, REST_S, Member, Members
from tests.support.freed import Request, left_of

A, B = "http://a:1", "http://b:1"


def client(url: str) -> ServerClient:
    return ServerClient(url, timeout_s=1)


def members(*urls: str) -> Members:
    return Members([client(url) for url in urls])


async def soon(awaitable: Any) -> str | None:
    """The url of who is chosen, if someone is without further events."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if task.done():
        return task.result().client.url
    task.cancel()
    return None


def test_work_waits_while_there_is_no_server():
    async def scenario() -> None:
        fleet = members(A)
        assert await soon(fleet.next()) == A
        fleet.drop(A)
        waiting = asyncio.create_task(fleet.next())
        await asyncio.sleep(1000)
        assert not waiting.done()
        fleet.add(Member(client(B)), waits=False)
        assert (await waiting).client.url == B

    run_virtual(scenario())


def test_a_server_without_weights_gets_no_work_until_it_has_them():
    async def scenario() -> None:
        fleet = members(A)
        epoch = fleet.epoch
        fleet.add(Member(client(B)), waits=True)
        assert [member.client.url for member in fleet.present] == [A]
        assert not fleet.none_serves
        await fleet.let_in()
        assert [member.client.url for member in fleet.present] == [A, B]
        assert fleet.epoch > epoch
        fleet.present[0].in_flight = 100
        assert await soon(fleet.next()) == A
        fleet.serve()
        assert await soon(fleet.next()) == B

    run_virtual(scenario())


def test_servers_that_wait_alone_are_a_fleet_of_which_none_serves():
    async def scenario() -> None:
        fleet = members(A)
        none_serves = asyncio.create_task(fleet.until_none_serves())
        fleet.drop(A)
        await asyncio.sleep(1)
        assert not none_serves.done(), "there is nobody who could serve"
        fleet.add(Member(client(B)), waits=True)
        await none_serves
        await fleet.let_in()
        assert not fleet.none_serves, "it takes part in the weight sync that is under way"

    run_virtual(scenario())


def test_a_server_that_cannot_be_reached_is_left_in_peace_for_a_while():
    """It may be about to be taken out; one that answers with an error may be asked at once."""

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        fleet = members(A)
        fleet.present[0].rest(unreachable=False)
        assert await soon(fleet.next()) == A
        fleet.present[0].rest(unreachable=True)
        began_s = clock()
        assert (await fleet.next()).client.url == A
        assert clock() - began_s == pytest.approx(REST_S)
        fleet.present[0].rest(unreachable=True)
        asyncio.get_running_loop().call_later(1, fleet.drop, A)
        asyncio.get_running_loop().call_later(2, lambda: fleet.add(Member(client(B)), waits=False))
        began_s = clock()
        assert (await fleet.next()).client.url == B
        assert clock() - began_s == pytest.approx(2)

    run_virtual(scenario())


def test_who_has_computed_the_beginning_is_asked_again_unless_it_rests_or_is_gone():
    async def scenario() -> None:
        fleet = members(A, B)
        fleet.present[1].in_flight = 5
        assert await soon(fleet.next()) == A, "the least loaded"
        assert await soon(fleet.next(prefer=B)) == B
        assert await soon(fleet.next(prefer="http://c:1")) == A
        fleet.present[1].rest(unreachable=False)
        assert await soon(fleet.next(prefer=B)) == A
        fleet.drop(B)
        assert await soon(fleet.next(prefer=B)) == A

    run_virtual(scenario())


def test_what_a_server_works_on_ends_when_it_leaves():
    async def scenario() -> None:
        fleet = members(A)
        (member,) = fleet.present

        async def never(client: ServerClient) -> None:
            await asyncio.Event().wait()

        work = asyncio.create_task(member.reply(never))
        await asyncio.sleep(1)
        assert member.in_flight == 1
        fleet.drop(A)
        with pytest.raises(ServerUnreachable) as caught:
            await work
        assert caught.value.taken_out
        assert member.in_flight == 0

    run_virtual(scenario())


def test_a_server_is_in_once():
    fleet = members(A)
    fleet.add(Member(client(B)), waits=True)
    for url in (A, B):
        with pytest.raises(ValueError, match=f"^{url} is in this fleet already$"):
            fleet.add(Member(client(url)), waits=False)
    fleet.drop(B)
    with pytest.raises(ValueError, match=f"^{B} is no server of this fleet$"):
        fleet.drop(B)
    assert [c.url for c in fleet.clients] == [A, B]


def timed_out(*, stalled: bool) -> ServerUnreachable:
    error = ServerUnreachable(A, "/generate", "no progress", sent=True, stalled=stalled)
    error.__cause__ = TimeoutError()
    return error


async def hangs(*outcomes: ServerUnreachable | None) -> bool:
    """Whether a server hangs after requests that ended like this; None: with a reply."""
    member = Member(client(A))
    for outcome in outcomes:

        async def call(_: ServerClient, outcome: ServerUnreachable | None = outcome) -> str:
            if outcome is not None:
                raise outcome
            return "reply"

        with suppress(ServerUnreachable):
            await member.reply(call)
    hung = asyncio.ensure_future(member.hung())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    hung.cancel()
    return hung.done() and not hung.cancelled()


def test_a_server_that_says_nothing_hangs_and_one_that_stalls_does_when_it_always_does():
    stalled = [timed_out(stalled=True) for _ in range(HUNG_AFTER)]
    broken = ServerUnreachable(A, "/generate", "reset", sent=True)

    async def scenario() -> None:
        assert await hangs(timed_out(stalled=False))
        assert await hangs(*stalled)
        assert not await hangs(*stalled[1:]), "a prompt that no server can sample ends before"
        assert not await hangs(*stalled[1:], None, stalled[0]), "a reply came between"
        assert not await hangs(*[broken] * 9)

    run_virtual(scenario())


def test_a_server_that_drains_finishes_what_it_has_and_gets_no_more():
    async def scenario() -> None:
        fleet = members(A, B)
        done = asyncio.Event()

        async def work(client: ServerClient) -> None:
            await done.wait()

        working = asyncio.create_task(fleet.at(A).reply(work))
        await asyncio.sleep(0)
        draining = asyncio.create_task(fleet.drain(A, 100))
        await asyncio.sleep(1)
        fleet.at(B).in_flight = 100
        assert await soon(fleet.next()) == B
        fleet.serve()
        assert await soon(fleet.next()) == B, "a weight sync gives it no work"
        assert (fleet.at(A).state, fleet.at(B).state) == ("draining", "serving")
        assert not draining.done()
        done.set()
        assert await draining == 0
        await working

    run_virtual(scenario())


def test_a_server_drains_no_longer_than_it_may():
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        fleet = members(A)

        async def never(client: ServerClient) -> None:
            await asyncio.Event().wait()

        work = asyncio.create_task(fleet.at(A).reply(never))
        await asyncio.sleep(0)
        began_s = clock()
        assert await fleet.drain(A, 30) == 1
        assert clock() - began_s == pytest.approx(30)
        fleet.drop(A)
        with pytest.raises(ServerUnreachable) as caught:
            await work
        assert caught.value.taken_out, "it is sent again, which costs no try"

    run_virtual(scenario())


def test_servers_that_only_drain_and_wait_are_a_fleet_of_which_none_serves():
    async def scenario() -> None:
        fleet = members(A)
        fleet.add(Member(client(B)), waits=True)
        none_serves = asyncio.create_task(fleet.until_none_serves())
        await asyncio.sleep(1)
        assert not none_serves.done()
        await fleet.drain(A, 1)
        await asyncio.sleep(0)  # Python 3.12 takes a turn of the loop more
        assert none_serves.done(), "B must get weights now, not with a version that needs work"

    run_virtual(scenario())


def chosen(fleet: Members, *, evaluates: bool) -> Any:
    return soon(fleet.next(evaluates=evaluates))


def test_servers_for_evaluations_take_nothing_else_while_others_serve():
    async def scenario() -> None:
        fleet = Members([client(A), client(B)], evaluators=1)
        first, second = fleet.present
        first.in_flight, second.in_flight = 7, 3
        assert await chosen(fleet, evaluates=True) == A
        first.in_flight, second.in_flight = 3, 7
        assert await chosen(fleet, evaluates=False) == B

    run_virtual(scenario())


def test_what_is_left_serves_both_and_there_are_as_many_for_evaluations_again():
    async def scenario() -> None:
        fleet = Members([client(A), client(B)], evaluators=1)
        fleet.drop(A)
        for evaluates in (True, False):
            assert await chosen(fleet, evaluates=evaluates) == B
        fleet.add(Member(client(A)), waits=True)
        for evaluates in (True, False):
            assert await chosen(fleet, evaluates=evaluates) == B, "A has no weights yet"
        await fleet.let_in()
        fleet.serve()
        assert await chosen(fleet, evaluates=True) == B, "the first one"
        assert await chosen(fleet, evaluates=False) == A

    run_virtual(scenario())


def test_without_servers_for_evaluations_all_take_both():
    async def scenario() -> None:
        fleet = members(A, B)
        fleet.present[0].in_flight = 1
        for evaluates in (True, False):
            assert await chosen(fleet, evaluates=evaluates) == B
        fleet.present[1].in_flight = 2
        for evaluates in (True, False):
            assert await chosen(fleet, evaluates=evaluates) == A

    run_virtual(scenario())


def test_what_a_request_has_sent_is_freed_with_its_error():
    async def ask(request: Request) -> None:
        await Member(client(A)).reply(lambda _: request())

    assert left_of(ask, fails=True) is None
