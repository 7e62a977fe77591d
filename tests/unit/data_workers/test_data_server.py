"""Data workers give samples to ranks of their run, and refuse everybody else."""

import asyncio

import msgspec
import pytest

from megatron_opd.data_workers import data_server as server_module
from megatron_opd.data_workers.data_client import CannotFetch, DataClient
from megatron_opd.wire.keys import RunKeys
from tests.support.data_servers import SOON_S, A, RunningServer, drive, fetch, rank_socket


def test_a_stranger_who_knows_the_public_key_is_refused_and_counted(client: DataClient):
    async def body(servers: list[RunningServer]) -> None:
        stranger = rank_socket(servers[0].address, RunKeys.make().learner)
        await stranger.send(msgspec.msgpack.encode(["a-1"]))
        while not servers[0].refused:  # noqa: ASYNC110  a count has no event
            await asyncio.sleep(0.01)
        assert await stranger.poll(100) == 0
        assert servers[0].asked == []
        assert await fetch(client, {servers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}
        stranger.context.destroy(linger=0)

    drive(body, A)


def test_garbage_is_counted_and_nothing_is_given(client: DataClient):
    questions = [
        [b"\xc1"],
        [b""],
        [msgspec.msgpack.encode("a-1")],
        [msgspec.msgpack.encode([1])],
        [msgspec.msgpack.encode(["a-1"]), b"more"],
        [b"\x91" * 100_000],
        [msgspec.msgpack.encode(["a-1", "a-2", "a-1"])],
        [b"\x91\xa1\xff"],  # no UTF-8
    ]

    async def body(servers: list[RunningServer]) -> None:
        rank = rank_socket(servers[0].address)
        for frames in questions:
            await rank.send_multipart(frames)
        await rank.send(msgspec.msgpack.encode(["a-1"]))
        assert await rank.recv_multipart() == [b"a-1", *A["a-1"]]
        assert servers[0].refused == len(questions)
        assert servers[0].asked == ["a-1"]
        assert await fetch(client, {servers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}
        rank.context.destroy(linger=0)

    drive(body, A)


def test_ranks_that_leave_are_no_strangers():
    async def body(servers: list[RunningServer]) -> None:
        (server,) = servers
        for _ in range(3):
            rank = DataClient(1 << 20)
            assert await fetch(rank, {server.address: ["a-1"]}) == {"a-1": A["a-1"]}
            await asyncio.to_thread(rank.close)
        stranger = rank_socket(server.address, RunKeys.make().learner)
        async with asyncio.timeout(SOON_S):
            while not server.refused:  # noqa: ASYNC110  a count has no event
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert server.refused == 1
        stranger.context.destroy(linger=0)

    drive(body, A)


def test_a_question_that_is_too_long_ends_its_connection(
    client: DataClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_module, "MAX_ASK_BYTES", 1000)

    async def body(servers: list[RunningServer]) -> None:
        with pytest.raises(CannotFetch, match="out of reach"):
            await fetch(client, {servers[0].address: ["a-1" * 1000]}, silent_s=SOON_S)
        assert servers[0].asked == []
        assert await fetch(client, {servers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}

    drive(body, A)
