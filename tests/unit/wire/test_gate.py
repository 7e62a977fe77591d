"""What strangers and a vanished host can do to the learner's wire."""

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
import zmq.asyncio

from megatron_opd.errors import LearnerError
from megatron_opd.transport import messages as m
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.wire import sockets
from megatron_opd.wire.keys import RankKeys, RunKeys
from tests.support.batches import FIGURES, done, make_shares
from tests.support.wire import KEYS, Rank, channel, config, connect, drive, hello


def silent(request: m.Request) -> None:
    return None


async def refused(remote: RemoteLearner, least: int = 1) -> int:
    """Wait until so much was refused."""
    async with asyncio.timeout(5):
        while remote.frames_refused < least:  # noqa: ASYNC110  a count has no event
            await asyncio.sleep(0.01)
    return remote.frames_refused


# the second has seen the controller's public key, which is no secret
STRANGERS = {
    "no keys": None,
    "a key of its own": RankKeys(KEYS.ranks.controller, RunKeys.make().learner),
    "another run's learner": RunKeys.make().ranks,
}
FORGED = {
    "garbage": b"\xc1 not msgpack",
    "a second hello for rank 0": m.encode(hello()),
    "an answer": m.encode(m.RankDone(1, FIGURES)),
    "a failure": m.encode(m.RankError(0, "\x1b[2J\x1b[31mall is lost")),
    "a large frame": bytes(8 * 2**20),
}


@pytest.mark.parametrize("what", FORGED)
@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_neither_heard_nor_answered(what: str, who: str):
    """Before: garbage and the forged failure ended the run, the forged hello got the requests."""

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with zmq.asyncio.Context() as context:
            stranger = connect(context, remote.address, STRANGERS[who])
            with contextlib.suppress(zmq.Again):  # it may be refused before it could send
                await stranger.send(FORGED[what], zmq.NOBLOCK)
            assert await refused(remote) >= 1
            assert await remote.train(make_shares()) == FIGURES
            assert await stranger.poll(100) == 0
            stranger.close()

    (rank,) = drive(body, [done])
    assert [type(request) for request, _ in rank.received] == [m.Train]


def test_a_second_learner_with_the_keys_is_told_that_the_rank_is_taken():
    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with zmq.asyncio.Context() as context:
            second = connect(context, remote.address)
            await second.send(m.encode(hello()))
            answer = m.decode_request(await second.recv())
            assert answer == m.RankRefused("rank 0 is already taken by another peer")
            await second.send(m.encode(m.RankDone(1, FIGURES)))
            await refused(remote, 2)
            second.close()
        assert await remote.train(make_shares()) == FIGURES

    drive(body, [done])


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b"\xc1"], "rank 0: unreadable message"),
        (
            [m.encode(m.RankDone(1, FIGURES)), b"more"],
            "rank 0: a learner's message has 1 frame, got 2",
        ),
        ([m.encode(m.RankDone(99, FIGURES))], "rank 0 answered call 99, which was never made"),
        ([m.encode(hello())], "rank 0 said hello twice"),
        ([m.encode(m.RankError(0, "\x1b[31mred\nline"))], r"rank 0: \\x1b\[31mred line"),
    ],
)
def test_what_a_rank_must_not_say_ends_the_run_and_names_it(frames: list[bytes], words: str):
    async def main() -> None:
        remote = RemoteLearner(config(), Admission(KEYS, {}, 512))
        rank = Rank(remote.address, 0, 1, silent)
        task = asyncio.create_task(rank.run())
        try:
            await remote.wait_ready(5)
            await rank.socket.send_multipart(frames)
            with pytest.raises(LearnerError, match=words):
                await remote.train(make_shares())
        finally:
            task.cancel()
            remote.close()
            rank.context.destroy(linger=0)

    asyncio.run(main())


def test_a_frame_above_the_limit_is_not_buffered_whole():
    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError, match="rank 0 is gone"):
            await remote.train(make_shares())

    drive(body, [lambda request: m.RankError(0, "x" * (m.MAX_REPLY_BYTES + 1))])


@contextmanager
def wire_that_can_be_cut(address: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A forwarder in front of `address`; once cut, bytes vanish and nobody is told."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    is_cut, ends = threading.Event(), []

    def forward(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            if not is_cut.is_set():
                target.sendall(data)

    def serve() -> None:
        inner, _ = listener.accept()
        outer = socket.create_connection((host, int(port)))
        ends.extend((inner, outer))
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=_until_closed, args=(forward, *pair), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", is_cut.set
    finally:
        listener.close()
        for end in ends:
            end.close()


def _until_closed(forward: Callable[..., None], *pair: socket.socket) -> None:
    try:
        forward(*pair)
    except OSError:
        return  # the test is over


async def joined_through_a_wire(
    body: Callable[[RemoteLearner, Callable[[], None], queue.Queue[str]], Awaitable[None]],
) -> None:
    """Run `body(remote, cut, lost)` with a real rank behind a wire that `cut` cuts."""
    remote, lost = RemoteLearner(config(), Admission(KEYS, {}, 512)), queue.Queue[str]()
    with wire_that_can_be_cut(remote.address) as (address, cut):
        rank = channel(address, on_lost=lost.put)
        try:
            joining = asyncio.create_task(asyncio.to_thread(rank.join, hello()))
            await remote.wait_ready(5)
            await joining
            await body(remote, cut, lost)
        finally:
            remote.close()
            rank.close()


def test_a_rank_whose_model_is_refused_is_no_stranger(caplog: pytest.LogCaptureFixture):
    """Before: its failure, and then "refused ...: a connection without the run's keys"."""

    async def main() -> None:
        remote = RemoteLearner(config(), Admission(KEYS, {}, 512))
        waiting = asyncio.create_task(remote.wait_ready(5))
        with zmq.asyncio.Context() as context:
            rank = connect(context, remote.address)
            await rank.send(m.encode(m.RankError(0, "student.model holds NaN")))
            with pytest.raises(LearnerError, match=r"rank 0: student\.model holds NaN"):
                await waiting
            rank.close(linger=0)
            silent_one = connect(context, remote.address)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(silent_one.poll(300), 5)
            silent_one.close(linger=0)
            assert await refused(remote) == 1
        remote.close()
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "ended before it said a word, as a rank's does that cannot start" in said[0]

    asyncio.run(main())


def test_both_ends_notice_a_host_that_vanished(monkeypatch: pytest.MonkeyPatch):
    assert sockets.HEARTBEAT_MS + sockets.HEARTBEAT_TIMEOUT_MS <= 10_000
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 300)

    async def body(remote: RemoteLearner, cut: Callable[[], None], lost: queue.Queue[str]) -> None:
        cut()
        async with asyncio.timeout(5):
            assert str(await remote.failed()) == "learner rank 0 is gone: its connection ended"
        assert "is gone: this rank ends" in await asyncio.to_thread(lost.get, timeout=5)

    asyncio.run(joined_through_a_wire(body))


def test_a_controller_that_is_busy_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 500)

    async def body(remote: RemoteLearner, cut: Callable[[], None], lost: queue.Queue[str]) -> None:
        time.sleep(1.5)  # noqa: ASYNC251  what is tested: nothing else runs on this loop
        await asyncio.sleep(0.1)
        assert lost.empty()
        failed = asyncio.create_task(remote.failed())
        await asyncio.sleep(0.1)
        assert not failed.done()
        failed.cancel()

    asyncio.run(joined_through_a_wire(body))


def test_a_rank_that_dies_as_it_says_hello_is_noticed():
    """Before: its connection's end was read before its hello, and it counted as ready for ever."""

    async def main() -> None:
        remote = RemoteLearner(config(), Admission(KEYS, {}, 512))
        ready = asyncio.ensure_future(remote.wait_ready(5))
        with zmq.Context() as context:
            rank = connect(context, remote.address)
            monitor = rank.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            while not monitor.poll(0):  # noqa: ASYNC110  another thread's socket
                await asyncio.sleep(0.01)
            rank.set(zmq.LINGER, 1000)
            rank.send(m.encode(hello()))
            rank.disable_monitor()
            monitor.close()
            rank.close()
        # sent and closed while this loop did not turn: term() waited for both
        time.sleep(0.2)  # noqa: ASYNC251  and the end has arrived too
        async with asyncio.timeout(5):
            error = await remote.failed()
        assert str(error) == "learner rank 0 is gone: it left before its welcome"
        await asyncio.gather(ready, return_exceptions=True)
        remote.close()

    asyncio.run(main())


def test_strangers_do_not_hold_up_the_wire_while_the_controller_is_busy():
    """Before: after 2,000 unread events ZeroMQ's own thread stopped, heartbeats and all."""
    remote = RemoteLearner(config(), Admission(KEYS, {}, 512))
    address = ("127.0.0.1", int(remote.address.rpartition(":")[2]))
    try:
        for _ in range(2500):
            with socket.create_connection(address, timeout=10) as stranger:
                assert stranger.recv(1) == b"\xff"  # ZeroMQ's greeting
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(80))
    finally:
        remote.close()
