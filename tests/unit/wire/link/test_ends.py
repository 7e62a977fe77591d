"""Two ends over TCP: messages, breaks, restarts, back-pressure."""

import asyncio
import random
import socket

import pytest

from checks.link.proxy import Proxy
from megatron_opd.wire.link.events import Broken, LinkRefused, Mended, Received, Restarted
from megatron_opd.wire.link.wire import BULK, LANES
from tests.support.link_ends import (
    OTHER_KEYS,
    PATIENCE_S,
    drive,
    ends,
    event,
    link_config,
    message,
    serve,
)


def test_messages_go_both_ways_with_their_parts_and_lanes():
    async def body() -> None:
        async with ends() as net:
            client = net.client()
            await client.send([b"one", b"", bytearray(b"two")], BULK)
            assert await net.server.next() == Restarted("site")
            assert await client.next() == Restarted("server")
            got = await net.server.next()
            assert isinstance(got, Received)
            assert (got.peer, got.lane) == ("site", BULK)
            assert [bytes(part) for part in got.parts] == [b"one", b"", b"two"]
            await net.server.send("site", [])
            assert (await event(client, Received)).parts == ()

    drive(body)


def test_every_message_comes_once_in_order_over_connections_that_are_cut():
    chance = random.Random(3)

    async def body() -> None:
        async with ends(link_config(chunk_bytes=20_000)) as net:
            proxy = Proxy(net.port, cut_after=lambda: chance.randint(0, 150_000))
            client = net.client(await proxy.start())
            sent: dict[int, list[bytes]] = {lane: [] for lane in LANES}
            got: dict[int, list[bytes]] = {lane: [] for lane in LANES}
            for number in range(80):
                lane = number % 2
                text = number.to_bytes(2, "big") + chance.randbytes(
                    chance.choice((5, 9000, 60_000))
                )
                sent[lane].append(text)
                await client.send([text], lane)
            while any(len(got[lane]) < len(sent[lane]) for lane in LANES):
                found = await event(net.server, Received)
                got[found.lane].append(b"".join(found.parts))
            await client.close(linger_s=5)
            assert got == sent
            assert proxy.cuts > 10
            assert net.server.counts("site").connections > proxy.cuts / 2
            await proxy.close()

    drive(body)


def test_a_large_message_goes_in_chunks_of_little_overhead():
    async def body() -> None:
        async with ends() as net:
            client = net.client()
            big = random.Random(0).randbytes(20 << 20)
            await client.send([big], BULK)
            assert await message(net.server) == big
            counts = client.counts()
            assert counts.wire_bytes_sent < 1.01 * len(big)
            assert counts.chunks_sent >= 5

    drive(body)


def test_the_other_process_is_new_after_its_restart():
    """What was sent before the owner knows of the restart was meant for the old one."""

    async def body() -> None:
        async with ends() as net:
            client = net.client()
            assert await client.next() == Restarted("server")
            address = net.server.address
            await net.server.close()
            net.server = serve(net.config, address)
            assert await event(net.server, Restarted) == Restarted("site")
            await net.server.send("site", [b"from the new one"])
            while client.counts().connections < 2:  # noqa: ASYNC110  a count has no event
                await asyncio.sleep(0.01)
            await client.send([b"to the old one"])
            assert await client.next() == Restarted("server")
            await client.send([b"to the new one"])
            assert await message(net.server) == b"to the new one"
            assert await message(client) == b"from the new one"
            assert client.counts().messages_dropped == 1

    drive(body)


def test_of_two_processes_with_one_name_the_newer_one_stays():
    async def body() -> None:
        async with ends() as net:
            older = net.client()
            assert await older.next() == Restarted("server")
            newer = net.client()
            assert await newer.next() == Restarted("server")
            with pytest.raises(LinkRefused, match=r"^a newer process has the name site$"):
                await older.next()
            with pytest.raises(LinkRefused, match="newer"):
                await older.send([b"more"])
            await newer.send([b"here"])
            assert await message(net.server) == b"here"

    drive(body)


def test_who_was_replaced_while_its_link_was_broken_is_told_when_it_returns():
    async def body() -> None:
        async with ends() as net:
            proxy = Proxy(net.port)
            older = net.client(await proxy.start())
            assert await older.next() == Restarted("server")
            proxy.frozen = True
            newer = net.client()
            assert await newer.next() == Restarted("server")
            proxy.cut()
            proxy.frozen = False
            with pytest.raises(LinkRefused, match="a newer process has the name site"):
                await older.next()
            await newer.send([b"here"])
            assert await message(net.server) == b"here"
            await proxy.close()

    drive(body)


def test_silence_is_told_and_so_is_its_end():
    async def body() -> None:
        async with ends(link_config(silence_s=0.4)) as net:
            proxy = Proxy(net.port)
            client = net.client(await proxy.start())
            assert await client.next() == Restarted("server")
            proxy.frozen = True
            assert await event(net.server, Broken) == Broken("site")
            assert await event(client, Broken) == Broken("server")
            await client.send([b"meanwhile"])
            proxy.frozen = False
            assert await event(client, Mended) == Mended("server")
            assert await event(net.server, Mended) == Mended("site")
            assert await message(net.server) == b"meanwhile"
            await proxy.close()

    drive(body)


def test_who_sends_waits_while_too_much_waits():
    async def body() -> None:
        async with ends(link_config(outbox_bytes=1000)) as net:
            proxy = Proxy(net.port, frozen=True)
            client = net.client(await proxy.start())
            await client.send([bytes(2000)])
            waits = asyncio.create_task(client.send([b"second"]))
            await client.send([b"the other lane"], BULK)
            await asyncio.sleep(0.05)
            assert not waits.done()
            proxy.frozen = False
            proxy.cut()
            await waits
            got = {await message(net.server) for _ in range(3)}
            assert got == {bytes(2000), b"second", b"the other lane"}
            await proxy.close()

    drive(body)


def test_who_does_not_take_messages_is_sent_no_more():
    async def body() -> None:
        async with ends(link_config(outbox_bytes=100_000, chunk_bytes=10_000)) as net:
            client = net.client()
            sending = asyncio.create_task(_send_all(client, 60))
            await asyncio.sleep(0.3)
            waiting = net.server.counts("site").bytes_received
            assert waiting <= 100_000 + 3 * 10_000
            assert not sending.done()
            for number in range(60):
                assert (await message(net.server))[0] == number
            await sending

    drive(body)


async def _send_all(client, count: int) -> None:
    for number in range(count):
        await client.send([bytes([number]), bytes(10_000)])


@pytest.mark.parametrize("side", ["own", "other"])
def test_a_message_above_the_limit_is_refused_where_it_is_sent(side: str):
    async def body() -> None:
        own, other = (100, 1000) if side == "own" else (1000, 100)
        async with ends(message_bytes=other) as net:
            client = net.client(message_bytes=own)
            assert await client.next() == Restarted("server")
            with pytest.raises(ValueError, match="a message of 101 bytes to server, above 100"):
                await client.send([bytes(100), b"x"])
            await client.send([bytes(100)])
            assert await message(net.server) == bytes(100)

    drive(body)


def test_heartbeats_tell_round_trip_time_and_clock_offset():
    async def body() -> None:
        async with ends() as net:
            client = net.client()
            for counts in (client.counts, lambda: net.server.counts("site")):
                while counts().rtt_s is None:  # noqa: ASYNC110  a count has no event
                    await asyncio.sleep(0.01)
                rtt_s, offset_s = counts().rtt_s, counts().clock_offset_s
                assert rtt_s is not None
                assert offset_s is not None
                assert abs(offset_s) <= rtt_s / 2 + 0.001  # one clock on one machine
            assert client.counts().connected

    drive(body)


def test_peers_do_not_mix():
    async def body() -> None:
        async with ends() as net:
            clients = {"site": net.client(), "other": net.client(keys=OTHER_KEYS)}
            for name, client in clients.items():
                await net.server.send(name, [name.encode()])
                await client.send([name.encode()])
            for name, client in clients.items():
                assert await message(client) == name.encode()
            got = [await event(net.server, Received) for _ in clients]
            assert all(found.peer == bytes(found.parts[0]).decode() for found in got)

    drive(body)


def test_an_address_that_is_taken_is_a_mistake_in_one_line():
    async def body() -> None:
        async with ends() as net:
            with pytest.raises(ValueError, match=r"cannot listen on tcp://127.0.0.1:"):
                serve(net.config, net.server.address)

    drive(body)


def test_a_closed_end_says_so():
    async def body() -> None:
        async with ends() as net:
            client = net.client()
            await client.close()
            with pytest.raises(LinkRefused, match="the link is closed"):
                await client.next()
            with pytest.raises(LinkRefused, match="the link is closed"):
                await client.send([b"late"])

    drive(body)


def test_what_waits_at_the_end_arrives_over_a_connection_that_was_just_broken():
    async def body() -> None:
        async with ends() as net:
            proxy = Proxy(net.port)
            client = net.client(await proxy.start())
            await event(net.server, Restarted)
            await event(client, Restarted)
            with socket.create_server(("127.0.0.1", 0)) as gone:
                nowhere = gone.getsockname()[1]
            proxy.target = nowhere
            proxy.cut()
            while net.server.counts("site").connected:  # noqa: ASYNC110  heartbeats find nobody
                await asyncio.sleep(0.01)
            await net.server.send("site", [b"farewell"])
            closing = asyncio.create_task(net.server.close(linger_s=PATIENCE_S))
            await asyncio.sleep(0)
            proxy.target = net.port
            assert await message(client) == b"farewell"
            await closing
            await proxy.close()

    drive(body)
