"""A rank's end of the wire against a scripted controller."""

import asyncio
import queue
import threading
from types import SimpleNamespace

import pytest
import zmq

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.errors import LearnerError
from megatron_opd.learner import channel as channel_module
from megatron_opd.learner.channel import ControllerChannel, ControllerLost, NotWelcome
from megatron_opd.transport import messages as m
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.wire.dealer import Dealer
from megatron_opd.wire.keys import RankKeys, RunKeys
from tests.support.wire import KEYS, channel, config, hello, router

HEAD = SimpleNamespace(is_head=True, parallel=ParallelConfig())
ANOTHER = RunKeys.make().ranks
WRONG = pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(RankKeys(KEYS.ranks.controller, ANOTHER.secret), id="another learner"),
        pytest.param(RankKeys(ANOTHER.controller, KEYS.learner), id="another controller"),
        pytest.param(ANOTHER, id="another run"),
    ],
)


def test_a_rank_joins_receives_requests_and_reports_failures():
    with router() as (socket, address):
        rank = channel(address)
        answer = threading.Thread(target=lambda: welcome(socket))
        answer.start()
        try:
            assert rank.join(hello()) == m.RankWelcome(None, "", False)
            answer.join()
            rank.report(ValueError("learner.parallel:\n  tp \x1b[31m"), final=True)
            identity, frame = socket.recv_multipart()
            assert m.decode_reply([frame]) == m.RankError(0, "learner.parallel: tp \\x1b[31m")
            rank.report(RuntimeError("boom"), final=False)
            boom = m.RankError(0, "RuntimeError: boom", final=False)
            assert m.decode_reply(socket.recv_multipart()[1:]) == boom
            socket.send_multipart([identity, m.encode(m.Stop(9)), b"raw"])
            request, frames = rank.receive(HEAD)
            assert request == m.Stop(9)
            assert [bytes(frame) for frame in frames] == [b"raw"]
        finally:
            rank.close()


def welcome(socket: zmq.Socket[bytes]) -> None:
    identity, frame = socket.recv_multipart()
    assert m.decode_reply([frame]) == hello()
    socket.send_multipart([identity, m.encode(m.RankWelcome(None, "", False))])


def test_a_rank_waits_for_keys_and_gives_up_on_a_controller_that_never_was():
    asked: list[None] = []

    def none_yet() -> None:
        asked.append(None)

    rank = channel("tcp://127.0.0.1:9", none_yet, first_s=2.0)
    try:
        with pytest.raises(ControllerLost, match=r"no controller at tcp:.*:9 within 2 s"):
            rank.join(hello())
        assert len(asked) > 1
        rank.report(ValueError("nobody hears it, and nothing waits"), final=True)
    finally:
        rank.close()


@pytest.mark.parametrize(
    "stale",
    [ANOTHER, RankKeys(KEYS.ranks.controller, ANOTHER.secret)],
    ids=["another run", "another learner"],
)
def test_a_rank_shows_the_keys_of_the_controller_that_came_after_an_earlier_one(stale: RankKeys):
    latest = [stale]

    def read() -> RankKeys:
        return latest[0]

    with router() as (socket, address):
        rank = channel(address, read)
        threading.Timer(1.0, lambda: latest.__setitem__(0, KEYS.ranks)).start()
        answer = threading.Thread(target=lambda: welcome(socket))
        answer.start()
        try:
            assert isinstance(rank.join(hello()), m.RankWelcome)
            answer.join()
            latest[0] = RunKeys.make().ranks  # a newer controller's, which is not for this rank
            rank.report(ValueError("last words"), final=True)
            assert m.decode_reply(socket.recv_multipart()[1:]) == m.RankError(0, "last words")
        finally:
            rank.close()


@WRONG
def test_a_rank_with_the_wrong_keys_says_so(wrong: RankKeys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "KEYS_GRACE_S", 0.2)
    with router() as (_, address):
        rank = channel(address, lambda: wrong)
        try:
            with pytest.raises(NotWelcome, match="MEGATRON_OPD_KEYS_FILE"):
                rank.join(hello())
        finally:
            rank.close()


def test_a_rank_that_is_refused_is_told_why_and_the_controller_fails():
    async def main() -> None:
        remote = RemoteLearner(config(), Admission(KEYS, {"learner.optimizer.lr": "a"}))
        rank = channel(remote.address)
        try:
            said = hello(digests={"learner.optimizer.lr": "b"})
            joining = asyncio.create_task(asyncio.to_thread(rank.join, said))
            why = "rank 0 was started with other settings than the controller: learner.optimizer.lr"
            with pytest.raises(LearnerError, match=why):
                await remote.wait_ready(5)
            with pytest.raises(NotWelcome, match=why):
                await joining
        finally:
            remote.close()
            rank.close()

    asyncio.run(main())


def join(rank: ControllerChannel, socket: zmq.Socket[bytes]) -> None:
    """The rank joins and `socket` welcomes it."""
    answer = threading.Thread(target=lambda: welcome(socket))
    answer.start()
    rank.join(hello())
    answer.join()


def assert_told_of_the_end(rank: ControllerChannel, lost: queue.Queue[str]) -> None:
    try:
        assert lost.get(timeout=5) == f"the controller at {rank.address} is gone: this rank ends"
    finally:
        rank.close()


def test_a_controller_that_is_gone_is_noticed_by_a_rank_that_does_not_listen():
    """Its process ends: the kernel closes the connection."""
    lost = queue.Queue[str]()
    with router() as (socket, address):
        rank = channel(address, on_lost=lost.put)
        join(rank, socket)
    assert_told_of_the_end(rank, lost)


def test_a_controller_that_is_gone_before_its_welcome_was_read_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
):
    """The welcome waits in this rank's queue when the connection ends. Before: never noticed."""
    lost, wait = queue.Queue[str](), channel_module.wait_for_any

    def slow_wait(ends: list[Dealer], wait_s: float) -> None:
        wait(ends, wait_s)
        messages, events = ends[0].sockets
        if messages.poll(0):  # the welcome is there: now its sender ends
            socket.close()
            assert events.poll(5000)

    monkeypatch.setattr(channel_module, "wait_for_any", slow_wait)
    with router() as (socket, address):
        rank = channel(address, on_lost=lost.put)
        join(rank, socket)
    assert_told_of_the_end(rank, lost)
