"""A simulated server's process: it dies with all that it holds."""

import asyncio

import pytest

from megatron_opd.sim.arrays import SharedArrays
from megatron_opd.sim.clock import run_virtual
from megatron_opd.sim.costs import EngineCost, LognormalLengths
from megatron_opd.sim.engine import Engine
from megatron_opd.sim.host import Host, OneByOne
from megatron_opd.sim.lengths import LengthDraws
from megatron_opd.sim.servers import Replies, SimulatedStudent, StudentClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import RolloutRequest


def student() -> tuple[SimulatedStudent, StudentClient]:
    """A server whose responses have 11 tokens and take 10 s, and its client."""
    host = Host()
    server = SimulatedStudent("http://s:1", lambda: Engine(EngineCost(step_s=1.0)), host)
    lengths = LengthDraws(LognormalLengths(mean=11.0), 100, 0)
    replies = Replies(SharedArrays(), lengths, 0.0, OneByOne(host, 0.0).work)
    return server, StudentClient(server, replies)


REQUEST = RolloutRequest(rid="r", input_ids=[1, 2], max_new_tokens=100, seed=1)


def test_a_reply_has_the_length_of_its_seed() -> None:
    async def scenario() -> None:
        _, client = student()
        reply = await client.generate(REQUEST)
        assert asyncio.get_running_loop().time() == 10.0
        assert reply.draws is not None
        assert (len(reply.output_ids_T), reply.draws.num_tokens) == (11, 11)
        assert (reply.spans, reply.finish_reason) == (((0, 0, 11),), "stop")

    run_virtual(scenario())


def test_what_a_server_works_on_ends_with_it() -> None:
    async def scenario() -> None:
        server, client = student()
        work = asyncio.create_task(client.generate(REQUEST))
        await asyncio.sleep(3.5)
        server.die()
        with pytest.raises(ServerUnreachable, match="reset"):
            await work
        assert asyncio.get_running_loop().time() == 3.5
        with pytest.raises(ServerUnreachable, match="refused"):
            await client.alive()
        server.start()
        await client.generate(REQUEST)
        assert asyncio.get_running_loop().time() == 13.5
        assert server.worked_s() == 13.5

    run_virtual(scenario())


def test_a_request_that_is_cancelled_leaves_the_server() -> None:
    async def scenario() -> None:
        server, client = student()
        work = asyncio.create_task(client.generate(REQUEST))
        await asyncio.sleep(3.5)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.sleep(100)
        assert server.model.running == 0
        assert server.worked_s() == 4.0

    run_virtual(scenario())
