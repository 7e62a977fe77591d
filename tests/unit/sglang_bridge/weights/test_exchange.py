"""Messages between threads over gloo: what arrives, in what order, through how much memory."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroupGloo

from sglang_bridge.weights import exchange
from sglang_bridge.weights.exchange import (
    BUFFERS,
    IN_FLIGHT,
    Message,
    PassedOn,
    PeerLost,
    receive,
    relay,
    said_plainly,
    send,
)
from tests.support.figures import bounded
from tests.support.receiving import CPU, canvas_of, gloo_groups
from tests.support.same_host import side_by_side

FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def pair() -> list[ProcessGroupGloo]:
    return gloo_groups(2, 30)


@pytest.fixture(scope="module")
def four() -> list[ProcessGroupGloo]:
    return gloo_groups(4, 30)


def message(peer: int, *views: torch.Tensor, dtype: torch.dtype = FLOAT) -> Message:
    return Message(peer, tuple(f"t{i}" for i in range(len(views))), views, dtype)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=25)
@given(data=st.data())
def test_what_is_sent_arrives(pair: Sequence[ProcessGroupGloo], data: st.DataObject):
    """Any shapes, cut out of larger tensors at both ends; each message of a dtype of its own."""
    shapes = st.lists(st.integers(1, 9), min_size=1, max_size=2)
    lists = data.draw(st.lists(st.lists(shapes, min_size=1, max_size=4), max_size=6))
    ours = data.draw(st.sampled_from([FLOAT, HALF]))
    sent, arrived, canvases = [], [], []
    for at, parts in enumerate(lists):
        theirs = data.draw(st.sampled_from([FLOAT, HALF, torch.float8_e4m3fn]))
        pairs = [(canvas_of(shape, ours), canvas_of(shape, theirs)) for shape in parts]
        for index, ((_, here), _) in enumerate(pairs):
            here.copy_(noise(*here.shape, seed=100 * at + index))
        sent.append(message(1, *(here for (_, here), _ in pairs), dtype=theirs))
        arrived.append(message(0, *(there for _, (_, there) in pairs), dtype=theirs))
        canvases += [canvas for _, (canvas, _) in pairs]
    side_by_side(lambda: send(pair[0], sent, CPU), lambda: receive(pair[1], arrived, CPU))
    for here, there in zip(sent, arrived, strict=True):
        assert here.nbytes == there.nbytes
        for mine, held in zip(here.views, there.views, strict=True):
            assert torch.equal(held.float(), mine.to(there.dtype).float())
    written = sum(int(canvas.float().isfinite().sum()) for canvas in canvases)
    numbers = sum(view.numel() for there in arrived for view in there.views)
    assert written == numbers, "and nothing beside the views"


def test_a_receiver_of_another_dtype_than_the_message_casts(pair: Sequence[ProcessGroupGloo]):
    whole, held = noise(40), torch.zeros(40, dtype=HALF)
    side_by_side(
        lambda: send(pair[0], [message(1, whole)], CPU),
        lambda: receive(pair[1], [message(0, held)], CPU),
    )
    assert torch.equal(held, whole.to(HALF))


def test_nothing_to_send_and_nothing_to_receive_is_no_wait(pair: Sequence[ProcessGroupGloo]):
    send(pair[0], [], CPU)
    receive(pair[1], [], CPU)


def test_messages_of_many_ranks_meet_in_one_order(four: Sequence[ProcessGroupGloo]):
    """Two senders, two receivers, several messages of every pair; ends listed as a plan does."""
    order = [(turn, s, 2 + (s + d) % 2) for turn in range(5) for d in range(2) for s in range(2)]
    weights = {at: noise(3000, seed=index) for index, at in enumerate(order)}
    held = {at: torch.zeros(3000) for at in order}

    def sender(rank: int) -> None:
        mine = [message(to, weights[t, s, to]) for t, s, to in order if s == rank]
        send(four[rank], mine, CPU)

    def receiver(rank: int) -> None:
        mine = [message(s, held[t, s, to]) for t, s, to in order if to == rank]
        receive(four[rank], mine, CPU)

    for _ in range(2):  # a second weight sync finds nothing of the first
        side_by_side(
            *(lambda r=r: sender(r) for r in (0, 1)), *(lambda r=r: receiver(r) for r in (2, 3))
        )
        assert all(torch.equal(held[at], weights[at]) for at in order)
        for at in order:
            weights[at] += 1


@settings(max_examples=15)
@given(data=st.data())
def test_what_is_passed_on_along_a_chain_is_what_was_sent(
    four: Sequence[ProcessGroupGloo], data: st.DataObject
):
    """From rank 0 over 1 and 2 to 3: any shapes and dtypes, more messages than are under way."""
    shapes = st.lists(st.integers(1, 9), min_size=1, max_size=2)
    lists = data.draw(st.lists(st.lists(shapes, min_size=1, max_size=3), max_size=6)) * 4
    dtypes = [data.draw(st.sampled_from([FLOAT, HALF, torch.int8])) for _ in lists]
    sent = [
        message(1, *(noise(*s, seed=i).mul(9).to(dtype) for s in parts), dtype=dtype)
        for i, (parts, dtype) in enumerate(zip(lists, dtypes, strict=True))
    ]
    # at rank 3 without padding: some of these lie as they travel
    held = [
        [
            [canvas_of(s, dtype)[1] if rank < 3 else torch.zeros(s, dtype=dtype) for s in parts]
            for parts, dtype in zip(lists, dtypes, strict=True)
        ]
        for rank in (1, 2, 3)
    ]

    def step(rank: int) -> None:
        messages = [
            message(rank - 1, *views, dtype=dtype)
            for views, dtype in zip(held[rank - 1], dtypes, strict=True)
        ]
        onward = [PassedOn(replace(m, peer=rank + 1), i) for i, m in enumerate(messages)]
        steps: list[Message | PassedOn] = [*messages[:1]]
        for following, passed in zip([*messages[1:], None], onward, strict=False):
            steps += [following] * (following is not None) + [passed] * (rank < 3)
        relay(four[rank], steps, CPU)

    side_by_side(lambda: send(four[0], sent, CPU), *(lambda r=r: step(r) for r in (1, 2, 3)))
    for there in held:
        for here, views in zip(sent, there, strict=True):
            for mine, other in zip(here.views, views, strict=True):
                assert torch.equal(mine, other)


def test_what_is_passed_on_waits_until_it_is_there_and_for_nothing_else():
    log: list[str] = []

    class Noted(Late):
        def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
            log.append(f"ask {tag}")
            return Work(lambda: (tensors[0].view(FLOAT).fill_(tag), log.append(f"got {tag}")))

        def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
            value = tensors[0].view(FLOAT)[0].item()
            log.append(f"pass on {tag}: {value:g}")
            return Work(lambda: log.append(f"left {tag}"))

    views = [torch.full((4,), -1.0) for _ in range(3)]
    first, second, third = (message(7, view) for view in views)
    steps = [first, second, PassedOn(replace(first, peer=8), 0), third]
    steps += [PassedOn(replace(third, peer=8), 2)]
    group: Any = Noted()
    relay(group, steps, CPU)
    assert log == [
        *("ask 0", "ask 1", "got 0", "pass on 0: 0", "ask 2"),
        *("got 1", "got 2", "pass on 1: 2", "left 0", "left 1"),
    ]


class Work:
    """One message under way; `done` happens when it is waited for."""

    def __init__(self, done: Callable[[], object]) -> None:
        self.done = done

    def wait(self) -> None:
        self.done()


@pytest.mark.parametrize("lost", [0, 2])
def test_who_is_lost_by_a_rank_that_passes_on_is_named(lost: int):
    """The one before it, or the one after it."""
    groups = gloo_groups(3, 5)
    held, size = torch.zeros(16 * 2**20), 16 * 2**20
    gone, other = groups[lost], groups[2 - lost]
    groups[lost] = None  # type: ignore[call-overload]
    del gone
    one = message(0, held)
    rest: list[Callable[[], None]] = []
    if lost == 2:
        rest.append(lambda: send(other, [message(1, torch.ones(size))], CPU))
    with pytest.raises(PeerLost) as caught:
        side_by_side(lambda: relay(groups[1], [one, PassedOn(replace(one, peer=2), 0)], CPU), *rest)
    assert caught.value.peer == lost


def test_what_is_read_of_a_view_is_what_is_sent(pair: Sequence[ProcessGroupGloo]):
    held = torch.zeros(4)
    seen: list[str] = []

    def read(name: str, view: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return 10 * view

    side_by_side(
        lambda: send(pair[0], [message(1, torch.ones(1), torch.full((3,), 2.0))], CPU, read),
        lambda: receive(pair[1], [message(0, held)], CPU),
    )
    assert held.tolist() == [10, 20, 20, 20]
    assert seen == ["t0", "t1"]


class Late:
    """A group whose messages are under way until they are waited for."""

    def __init__(self) -> None:
        self.under_way: list[torch.Tensor] = []
        self.most = 0
        self.memory: set[int] = set()
        self.sent: list[list[float]] = []
        self.tags: list[tuple[int, int]] = []
        self._kind = ""

    def name(self) -> str:
        return "gloo"

    def _start(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        assert all(tensor.data_ptr() != other.data_ptr() for other in self.under_way), "in use"
        self.under_way.append(tensor)
        self.most = max(self.most, len(self.under_way))
        self.memory.add(tensor.untyped_storage().data_ptr())
        self.tags.append((peer, tag))
        return self

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        self._kind = "send"
        return self._start(tensors, peer, tag)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        self._kind = "recv"
        return self._start(tensors, peer, tag)

    def wait(self) -> None:
        tensor = self.under_way.pop(0)
        if self._kind == "send":
            self.sent.append(tensor.view(FLOAT).tolist() if tensor.numel() % 4 == 0 else [])
        else:
            tensor.view(FLOAT if tensor.numel() % 4 == 0 else HALF).fill_(len(self.sent))
            self.sent.append([])


PEERS = (1, 2, 1, 1, 2, 1, 2)


def test_two_buffers_are_filled_in_turn_while_they_are_not_under_way():
    group: Any = Late()
    messages = [
        message(peer, torch.full((1,), float(i)), torch.full((2,), float(i)))
        for i, peer in enumerate(PEERS)
    ]
    send(group, messages, CPU)
    assert group.sent == [[float(i)] * 3 for i in range(len(PEERS))], "as it was when packed"
    assert (group.most, len(group.memory)) == (BUFFERS, BUFFERS)
    assert group.under_way == [], "all have left"
    assert group.tags == [(1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (1, 3), (2, 2)]


def test_two_buffers_are_emptied_in_turn():
    group: Any = Late()
    messages = [message(peer, torch.zeros(1), torch.zeros(2)) for peer in PEERS]
    receive(group, messages, CPU)
    arrived = [[*m.views[0].tolist(), *m.views[1].tolist()] for m in messages]
    assert arrived == [[float(i)] * 3 for i in range(len(PEERS))]
    assert (group.most, len(group.memory)) == (BUFFERS, BUFFERS)
    assert group.tags == [(1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (1, 3), (2, 2)]


@pytest.mark.parametrize("side", [send, receive])
def test_one_piece_of_memory_travels_without_a_copy(side: Callable[..., None]):
    group: Any = Late()
    views = [torch.zeros(4, 6)[1:3] for _ in range(3 * IN_FLIGHT)]
    side(group, [message(1, view) for view in views], CPU)
    assert group.memory == {view.untyped_storage().data_ptr() for view in views}
    assert (group.most, group.under_way) == (IN_FLIGHT, [])


@pytest.mark.parametrize(
    ("view", "options"),
    [
        (torch.zeros(4, 6)[:, 1:3], ()),
        (torch.zeros(4, 6, dtype=HALF), ()),
        (torch.zeros(4, 6), (lambda name, view: view + 1,)),
    ],
    ids=["in several pieces", "of another dtype", "changed on the way"],
)
def test_what_does_not_lie_as_it_travels_is_packed(view: torch.Tensor, options: tuple[Any, ...]):
    group: Any = Late()
    send(group, [message(1, view)] * 5, CPU, *options)
    assert view.untyped_storage().data_ptr() not in group.memory
    assert len(group.memory) == BUFFERS


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_memory_beside_the_weights_is_two_of_the_largest_messages(
    monkeypatch: pytest.MonkeyPatch, count: int
):
    made: list[int] = []
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(real(*args, **kwargs).nbytes)
        return real(*args, **kwargs)

    monkeypatch.setattr(exchange.torch, "empty", empty)
    messages = [message(1, torch.zeros(2 + i % 3), dtype=HALF) for i in range(count)]
    for side in (send, receive):
        made.clear()
        side(Late(), messages, CPU)  # type: ignore[arg-type]
        assert len(made) == min(count, BUFFERS)
        assert all(size == max(m.nbytes for m in messages) for size in made)


def test_a_peer_that_never_comes_is_an_error_within_the_timeout():
    """Both ways; more than sockets hold, or a sender would not notice. And after good messages."""
    limit_s = 1.5
    weights, held = noise(100), torch.zeros(100)
    for silent in ("receiver", "sender"):
        one, other = gloo_groups(2, limit_s)
        side_by_side(
            lambda a=one: send(a, [message(1, weights)], CPU),
            lambda b=other: receive(b, [message(0, held)], CPU),
        )
        assert torch.equal(held, weights)
        waits = {
            "receiver": lambda a=one: send(a, [message(1, torch.zeros(16 * 2**20))], CPU),
            "sender": lambda b=other: receive(b, [message(0, held)] * 2, CPU),
        }
        started = time.monotonic()
        with pytest.raises(
            PeerLost, match=r"^rank [01] of the group: (?i:.*timed out|.*timeout)"
        ) as e:
            waits[silent]()
        assert e.value.peer == {"receiver": 1, "sender": 0}[silent]
        assert "\n" not in str(e.value)
        waited_s = time.monotonic() - started
        assert waited_s > limit_s / 2
        bounded("a silent peer: error after (timeouts)", waited_s / limit_s, 6, silent)


def passed_on(group: Any, messages: Sequence[Message], device: torch.device) -> None:
    """Relay messages of rank 1 to rank 1, each once it is there."""
    steps: list[Message | PassedOn] = []
    for number, each in enumerate(messages):
        steps += [each, PassedOn(each, number)]
    relay(group, steps, device)


@pytest.mark.parametrize("side", [send, receive, passed_on])
@pytest.mark.parametrize("lost", ["before", "meanwhile"])
def test_who_has_lost_a_peer_leaves_the_group_at_once(side: Callable[..., None], lost: str):
    """Once nobody names the group, and not when garbage is collected: others wait for it."""
    groups = gloo_groups(3, 30)
    mine, other = weakref.ref(groups[0]), groups[2]
    messages = [message(1, torch.zeros(16 * 2**20)) for _ in range(2)]
    awaited = other.recv([torch.zeros(1, dtype=torch.uint8)], 0, 0)
    # what is posted fails, or what is waited for
    leaves = threading.Timer(0.1, groups.__setitem__, [1, None])
    leaves.start()
    if lost == "before":
        leaves.join()
    named = None
    gc.disable()
    try:
        try:
            side(groups[0], messages, CPU)
        except PeerLost as error:  # pytest.raises would keep it, with its frames
            named = error.peer
        groups[0] = None  # type: ignore[call-overload]
        assert named == 1
        assert mine() is None, "something else holds the group"
        with pytest.raises(RuntimeError, match=r"(?i)closed|reset"):
            awaited.wait()
    finally:
        gc.enable()


def test_names_and_views_that_differ_in_number_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        send(Late(), [Message(1, ("a",), (noise(2), noise(2)), FLOAT)], CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "plainly"),
    [
        (
            "[/pytorch/third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
            "[127.0.0.1]:3817. This is typically caused by a remote worker.\nmore",
            "Connection closed by peer [127.0.0.1]:3817",
        ),
        (
            "Timed out waiting 100ms for send operation",
            "Timed out waiting 100ms for send operation",
        ),
        ("", "RuntimeError"),
    ],
)
def test_what_gloo_says_is_told_in_a_sentence(said: str, plainly: str):
    assert said_plainly(RuntimeError(said)) == plainly
