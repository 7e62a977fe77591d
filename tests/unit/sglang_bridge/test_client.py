"""The client against a fake server: what is retried, what is not, and how errors read."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace

from sglang_bridge import wire
from sglang_bridge.arrays import unpack
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BadReply, ServerRefused, ServerUnreachable, WeightSyncFailed
from sglang_bridge.fleet import Fleet, weights_world
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import BucketSpec
from sglang_bridge.retry import Backoff
from sglang_bridge.work_request import Sampling
from tests.support.bridge_replies import (
    REQUEST,
    SCORE_REQUEST,
    SELECT_REQUEST,
    FakeServer,
    Handler,
    answering,
    breaking,
    rollout_reply,
    score_reply,
    worked,
)

QUICK = Backoff(attempts=3, first_wait_s=0.01)
BUCKET = BucketSpec(("w",), ("float32",), ((2, 3),))


def client_of(url: str, timeout_s: float = 5) -> ServerClient:
    return ServerClient(url, timeout_s=timeout_s, backoff=QUICK)


def test_rollout_and_scores_over_http():
    async def run():
        routes = {wire.WORK_ROUTE: answering(rollout_reply())}
        async with FakeServer(routes) as server, client_of(server.url) as client:
            reply = await client.generate(REQUEST)
            routes[wire.WORK_ROUTE] = answering(score_reply([-1, -2, -3]))
            return reply, await client.score(SCORE_REQUEST)

    reply, scores = asyncio.run(run())
    assert reply.output_ids_T.tolist() == [5, 9, 5]
    assert scores.logp_N.tolist() == [-1, -2, -3]


def asked(*calls: Callable[[ServerClient], Awaitable[object]]) -> list[dict]:
    """The bodies of the requests that `calls` send, one after the other."""
    bodies = []

    async def record(request: web.Request) -> web.StreamResponse:
        body = msgspec.msgpack.decode(await request.read())
        bodies.append(body | {"input_ids": unpack(body["input_ids"], "<i4").tolist()})
        return worked({})

    async def run():
        async with FakeServer({wire.WORK_ROUTE: record}) as server, client_of(server.url) as client:
            for call in calls:
                with pytest.raises(BadReply):
                    await call(client)

    asyncio.run(run())
    return bodies


def test_what_the_server_is_asked():
    requests = [
        REQUEST,
        replace(REQUEST, num_atoms=16),
        replace(REQUEST, num_draws=0, record=True),
        replace(REQUEST, num_draws=0),
    ]
    bodies = asked(*(lambda client, r=request: client.generate(r) for request in requests))
    assert bodies[0]["input_ids"] == [1, 2, 3]
    assert bodies[0]["sampling_params"]["max_new_tokens"] == 8
    params = [body["sampling_params"].get("custom_params") for body in bodies]
    assert params == [
        {"bridge_num_atoms": 0, "bridge_num_draws": 4},
        {"bridge_num_atoms": 16, "bridge_num_draws": 4},
        {"bridge_num_atoms": 0, "bridge_num_draws": 0},
        None,
    ]


def test_what_a_scoring_server_is_asked():
    (body,) = asked(lambda client: client.score(SELECT_REQUEST))
    params = body["sampling_params"]["custom_params"]
    assert body["logprob_start_len"] == 1
    assert unpack(params["bridge_score_runs"], "<i4").tolist() == [2, 3, 5, 7]
    assert (params["bridge_score_atoms"], params["bridge_score_draws"]) == (2, 2)
    assert params["bridge_score_temperature"] == 2.0
    assert unpack(params["bridge_score_lengths"], "<i4").tolist() == [2, 0, 1]
    assert unpack(params["bridge_score_ids"], "<i4").tolist() == [7, 8, 9]
    # SGLang's own is the sampler's: a request of 0 new tokens samples nothing.
    assert Sampling(**body["sampling_params"]).temperature == 1.0


@pytest.mark.parametrize("verb", ["generate", "score", "update_bucket"])
def test_work_and_weight_updates_are_never_repeated_below_their_caller(verb: str):
    """A second try would be another sample, one that nobody counts, or a broadcast of nobody."""

    async def run():
        routes = {
            path: breaking(1, answering(rollout_reply()))
            for path in (wire.WORK_ROUTE, "/update_weights_from_distributed")
        }
        async with FakeServer(routes) as server, client_of(server.url) as client:
            calls = {
                "generate": lambda: client.generate(REQUEST),
                "score": lambda: client.score(SCORE_REQUEST),
                "update_bucket": lambda: client.update_bucket(BUCKET, "g"),
            }
            with pytest.raises(ServerUnreachable) as caught:
                await calls[verb]()
            assert caught.value.sent
            return server.seen

    assert len(asyncio.run(run())) == 1


def test_what_changes_a_servers_state_is_repeated_where_that_does_no_harm():
    async def run():
        routes = {"/pause_generation": breaking(2, answering({}))}
        async with FakeServer(routes) as server, client_of(server.url) as client:
            await client.pause()
            return server.seen

    assert asyncio.run(run()) == ["/pause_generation"] * 3


def test_an_unreachable_server_is_told_from_a_silent_one():
    async def run():
        async with client_of(f"http://127.0.0.1:{free_port()}") as client:
            with pytest.raises(ServerUnreachable) as caught:
                await client.generate(REQUEST)
            assert not caught.value.sent
            with pytest.raises(ServerUnreachable):
                await client.alive()
        busy = answering({}, 503)
        async with FakeServer({"/model_info": busy}) as server, client_of(server.url) as client:
            assert not await client.alive()

    asyncio.run(run())


def test_a_server_that_starts_is_told_from_one_that_is_up():
    """It refuses control requests, which is said at once and not repeated."""
    starting, up = answering({"error": {"message": "starting"}}, wire.STARTING), answering({}, 400)

    async def run(reply: Handler) -> tuple[bool, list[str]]:
        routes = dict.fromkeys(("/weights_checker", "/pause_generation"), reply)
        async with FakeServer(routes) as server, client_of(server.url) as client:
            with pytest.raises(ServerRefused):
                await client.pause()
            return await client.has_started(), server.seen

    asked = ["/pause_generation", "/weights_checker"]
    assert asyncio.run(run(starting)) == (False, asked)
    assert asyncio.run(run(up)) == (True, asked)


def test_a_silent_server_times_out_once():
    asked = []

    async def never(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        await asyncio.sleep(1)
        return web.json_response({})

    routes = dict.fromkeys((wire.WORK_ROUTE, "/flush_cache", "/weights_checker"), never)
    routes["/abort_request"] = answering({})

    async def run():
        async with FakeServer(routes) as server, client_of(server.url, 0.2) as client:
            for call, said in (
                (client.generate, "no progress for 0.2 s, request_timeout_s"),
                (client.score, "no progress for 0.2 s, request_timeout_s"),
                (lambda _: client.flush_cache(), "TimeoutError"),
            ):
                work = SCORE_REQUEST if call == client.score else REQUEST
                with pytest.raises(ServerUnreachable, match=said) as caught:
                    await call(work)
                assert caught.value.timed_out
            assert server.seen.count("/abort_request") == 2

    asyncio.run(run())
    assert [path for path in asked if path != "/weights_checker"] == [
        wire.WORK_ROUTE,
        wire.WORK_ROUTE,
        "/flush_cache",
    ]


def test_work_that_makes_progress_has_time():
    """The server names it in its queue, and then with more and more tokens."""
    asked: list[str] = []

    async def progress(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["action"] == wire.PROGRESS_ACTION
        asked.append("")
        waits = len(asked) < 4
        running = {} if waits else {"r": len(asked)}
        said = {wire.RUNNING: json.dumps(running), wire.WAITING: json.dumps(["r"] if waits else [])}
        return web.json_response({"ranks": [{"checksums": said, "parallelism_info": []}]})

    async def generate(request: web.Request) -> web.StreamResponse:
        while len(asked) < 16:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return worked(rollout_reply())

    async def run() -> float:
        routes = {wire.WORK_ROUTE: generate, "/weights_checker": progress}
        async with FakeServer(routes) as server, client_of(server.url, 0.4) as client:
            began_s = asyncio.get_running_loop().time()
            await client.generate(REQUEST)
            return asyncio.get_running_loop().time() - began_s

    assert asyncio.run(run()) > 2 * 0.4


def test_a_client_s_pause_stops_the_clocks_of_its_work():
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async def run() -> bool:
        routes = dict.fromkeys(("/pause_generation", "/continue_generation"), answering({}))
        routes |= {wire.WORK_ROUTE: never, "/abort_request": answering({})}
        async with FakeServer(routes) as server, client_of(server.url, 0.2) as client:
            await client.pause()
            work = asyncio.ensure_future(client.generate(REQUEST))
            await asyncio.sleep(0.8)
            paused = not work.done()
            await client.resume()
            with pytest.raises(ServerUnreachable, match="no progress"):
                await work
            return paused

    assert asyncio.run(run())


def test_a_refusal_shows_the_servers_reason_on_one_line():
    async def run():
        body = {"success": False, "message": "no session\n is open"}
        path = "/begin_weight_update"
        async with (
            FakeServer({path: answering(body, 400)}) as server,
            client_of(server.url) as client,
        ):
            with pytest.raises(ServerRefused) as caught:
                await client.begin_weight_update()
            return server.url, str(caught.value)

    url, message = asyncio.run(run())
    assert message == f"{url}/begin_weight_update: HTTP 400: no session is open"


def test_a_server_without_the_plugin_is_refused():
    async def run():
        reply = rollout_reply()
        del reply["meta_info"]["bridge"]
        async with (
            FakeServer({wire.WORK_ROUTE: answering(reply)}) as server,
            client_of(server.url) as client,
        ):
            await client.generate(REQUEST)

    with pytest.raises(BadReply, match="is the server's plugin active"):
        asyncio.run(run())


def test_the_fleet_prefers_idle_servers_and_avoids_dead_ones():
    async def run():
        release, all_seen = asyncio.Event(), asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            if len(one.seen) + len(two.seen) == 6:
                all_seen.set()
            await release.wait()
            return worked(rollout_reply())

        async with (
            FakeServer({wire.WORK_ROUTE: slow}) as one,
            FakeServer({wire.WORK_ROUTE: slow}) as two,
        ):
            dead = client_of(f"http://127.0.0.1:{free_port()}")
            fleet = Fleet([dead, client_of(one.url), client_of(two.url)])
            with pytest.raises(ServerUnreachable):
                await fleet.generate(REQUEST)  # from now on the dead one rests
            work = [asyncio.create_task(fleet.generate(REQUEST)) for _ in range(6)]
            await asyncio.wait_for(all_seen.wait(), 20)
            loads = [len(one.seen), len(two.seen)]
            assert fleet.in_flight == 6
            release.set()
            await asyncio.gather(*work)
            assert fleet.in_flight == 0
            await fleet.close()
            return loads

    assert asyncio.run(run()) == [3, 3]


def test_the_fleet_names_the_server_that_failed():
    async def run():
        fine = answering({"success": True})
        broken = answering({"success": False, "message": "out of memory"}, 400)
        path = "/begin_weight_update"
        async with FakeServer({path: fine}) as one, FakeServer({path: broken}) as two:
            fleet = Fleet([client_of(one.url), client_of(two.url)])
            with pytest.raises(WeightSyncFailed) as caught:
                await fleet.begin_weight_update()
            await fleet.close()
            return two.url, str(caught.value)

    url, message = asyncio.run(run())
    assert url in message
    assert "out of memory" in message


def test_a_fleet_of_different_models_does_not_start():
    def routes(vocab_size: str) -> dict:
        facts = {"vocab_size": vocab_size, "dtype": "float32", "quantization": "none"}
        facts["ends"] = "{}"
        rank = {"checksums": facts, "parallelism_info": []}
        server = {"tp_size": 1, "ep_size": 1, "max_total_num_tokens": 9}
        server["enable_deterministic_inference"] = False
        return {
            "/server_info": answering(server),
            "/model_info": answering({"model_path": "m", "weight_version": "0"}),
            "/v1/models": answering({"data": [{"max_model_len": 64}]}),
            "/weights_checker": answering({"ranks": [rank]}),
        }

    async def run():
        async with FakeServer(routes("512")) as one, FakeServer(routes("600")) as two:
            async with Fleet([client_of(one.url)]) as fleet:
                assert fleet.infos[0].context_length == 64
            fleet = Fleet([client_of(one.url), client_of(two.url)])
            try:
                await fleet.start()
            finally:
                await fleet.close()

    with pytest.raises(BadReply, match="differ in vocab_size"):
        asyncio.run(run())


def test_a_fleet_with_an_unreachable_server_does_not_start():
    async def run():
        async with Fleet([client_of(f"http://127.0.0.1:{free_port()}")]):
            pass

    with pytest.raises(ServerUnreachable, match="no answer"):
        asyncio.run(run())


def test_ranks_of_the_weight_update_group():
    world = weights_world([1, 2, 4], senders=1)
    assert world.size == 8
    assert world.rank_offsets == (1, 2, 4)
    with pytest.raises(ValueError, match="at least one server"):
        Fleet([])


def test_staged_digests_are_asked_for_until_every_rank_has_them():
    key = "n|0|0|7|float32"

    def ranks(*answers: dict[str, str]) -> object:
        held = [
            {"checksums": found, "parallelism_info": [{"tp_rank": rank}]}
            for rank, found in enumerate(answers)
        ]
        return {"ranks": held}

    pending, done = {wire.PENDING: ""}, {key: "00ff"}
    replies = [ranks(pending, pending), ranks(done, pending), ranks(done, done)]
    actions: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        actions.append((await request.json())["action"])
        return web.json_response(replies[len(actions) - 1])

    async def run():
        routes = {"/weights_checker": answer}
        async with FakeServer(routes) as server, client_of(server.url) as client:
            return await client.weight_digests(staged=True)

    found = asyncio.run(run())
    assert [(piece.rank, piece.hf_name, piece.digest) for piece in found] == [
        (0, "n", "00ff"),
        (1, "n", "00ff"),
    ]
    assert actions == [wire.STAGED_DIGEST_ACTION] * 3


def test_a_fleet_names_the_servers_that_were_silent_when_a_step_was_given_up():
    over = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.json_response({})

    async def run():
        path = "/pause_generation"
        async with FakeServer({path: answering({})}) as one, FakeServer({path: hang}) as two:
            fleet = Fleet([client_of(one.url, 60), client_of(two.url, 60)])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await fleet.pause()
            assert fleet.silent == (two.url,)
            await fleet.close()
            over.set()

    asyncio.run(run())
