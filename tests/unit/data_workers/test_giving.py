"""Data workers give samples to ranks of their run, and refuse everybody else."""

import asyncio

import msgspec
import pytest

from megatron_opd.data_workers import giving as giving_module
from megatron_opd.data_workers.taking import CannotTake, Taking
from megatron_opd.wire.keys import RunKeys
from tests.support.giving import SOON_S, A, Given, drive, rank_socket, take


def test_a_stranger_who_knows_the_public_key_is_refused_and_counted(taking: Taking):
    async def body(givers: list[Given]) -> None:
        stranger = rank_socket(givers[0].address, RunKeys.make().learner)
        await stranger.send(msgspec.msgpack.encode(["a-1"]))
        while not givers[0].refused:  # noqa: ASYNC110  a count has no event
            await asyncio.sleep(0.01)
        assert await stranger.poll(100) == 0
        assert givers[0].asked == []
        assert await take(taking, {givers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}
        stranger.context.destroy(linger=0)

    drive(body, A)


def test_garbage_is_counted_and_nothing_is_given(taking: Taking):
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

    async def body(givers: list[Given]) -> None:
        rank = rank_socket(givers[0].address)
        for frames in questions:
            await rank.send_multipart(frames)
        await rank.send(msgspec.msgpack.encode(["a-1"]))
        assert await rank.recv_multipart() == [b"a-1", *A["a-1"]]
        assert givers[0].refused == len(questions)
        assert givers[0].asked == ["a-1"]
        assert await take(taking, {givers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}
        rank.context.destroy(linger=0)

    drive(body, A)


def test_ranks_that_leave_are_no_strangers():
    async def body(givers: list[Given]) -> None:
        (giver,) = givers
        for _ in range(3):
            rank = Taking(1 << 20)
            assert await take(rank, {giver.address: ["a-1"]}) == {"a-1": A["a-1"]}
            await asyncio.to_thread(rank.close)
        stranger = rank_socket(giver.address, RunKeys.make().learner)
        async with asyncio.timeout(SOON_S):
            while not giver.refused:  # noqa: ASYNC110  a count has no event
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert giver.refused == 1
        stranger.context.destroy(linger=0)

    drive(body, A)


def test_a_question_that_is_too_long_ends_its_connection(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(giving_module, "MAX_ASK_BYTES", 1000)

    async def body(givers: list[Given]) -> None:
        with pytest.raises(CannotTake, match="out of reach"):
            await take(taking, {givers[0].address: ["a-1" * 1000]}, silent_s=SOON_S)
        assert givers[0].asked == []
        assert await take(taking, {givers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}

    drive(body, A)
