"""Messages between threads through shared memory: as what goes through the group, bit for bit."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroupGloo

from sglang_bridge.weights import host_lane
from sglang_bridge.weights.exchange import Message, PeerLost, receive, send
from sglang_bridge.weights.lanes import (
    DESCRIPTOR_BYTES,
    NONE,
    BadDescriptor,
    Lanes,
    forget_lanes,
    lanes_of,
    use_lanes,
)
from sglang_bridge.weights.legs import Inbox
from tests.support.receiving import CPU, canvas_of
from tests.support.same_host import groups_with_lanes, side_by_side

FLOAT, HALF = torch.float32, torch.bfloat16
LEG_BYTES, RING_BYTES = 128, 1024  # a message takes several legs, and fewer fit than are under way


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_lane, "RING_BYTES", RING_BYTES)
        patch.setattr(host_lane.HostLane, "leg_bytes", LEG_BYTES)
        yield


@pytest.fixture(scope="module")
def pair(_small: None) -> list[ProcessGroupGloo]:
    return groups_with_lanes(2, 1)


def message(peer: int, *views: torch.Tensor, dtype: torch.dtype = FLOAT) -> Message:
    return Message(peer, tuple(f"t{i}" for i in range(len(views))), views, dtype)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=25)
@given(data=st.data())
def test_what_is_sent_arrives(pair: Sequence[ProcessGroupGloo], data: st.DataObject):
    """Any shapes, cut out of larger tensors at both ends; parts are cut otherwise at each."""
    lengths = data.draw(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), max_size=6))
    ours = data.draw(st.sampled_from([FLOAT, HALF]))
    sent, arrived, canvases = [], [], []
    for at, parts in enumerate(lengths):
        theirs = data.draw(st.sampled_from([FLOAT, HALF, torch.float8_e4m3fn]))
        dense = data.draw(st.booleans())
        here = [canvas_of([length, 3], ours)[1] for length in parts]
        here = [torch.empty(view.shape, dtype=ours) if dense else view for view in here]
        for index, view in enumerate(here):
            view.copy_(noise(*view.shape, seed=100 * at + index))
        canvas, there = canvas_of([3, sum(parts)], theirs)
        sent.append(message(1, *here, dtype=theirs))
        arrived.append(message(0, there, dtype=theirs))
        canvases.append(canvas)
    side_by_side(lambda: send(pair[0], sent, CPU), lambda: receive(pair[1], arrived, CPU))
    for mine, held in zip(sent, arrived, strict=True):
        flat = torch.cat([view.reshape(-1) for view in mine.views]).to(mine.dtype)
        assert torch.equal(held.views[0].reshape(-1).float(), flat.float())
    written = sum(int(canvas.float().isfinite().sum()) for canvas in canvases)
    assert written == sum(held.views[0].numel() for held in arrived), "and nothing beside the views"


def test_what_is_read_of_a_view_is_what_is_sent(pair: Sequence[ProcessGroupGloo]):
    held, seen = torch.zeros(400), []

    def read(name: str, view: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return 10 * view

    views = torch.ones(100), torch.full((300,), 2.0)
    side_by_side(
        lambda: send(pair[0], [message(1, *views)], CPU, read),
        lambda: receive(pair[1], [message(0, held)], CPU),
    )
    assert held.tolist() == [10.0] * 100 + [20.0] * 300
    assert seen == ["t0", "t1"], "each once, however many legs it takes"


def test_ranks_with_and_without_lanes_meet_in_one_order():
    """Two senders, three receivers; one receiver has lanes to neither, one to the first alone."""
    groups = groups_with_lanes(5, 2)
    for rank, senders in ((2, (0, 1)), (3, (0,)), (4, ())):
        known = lanes_of(groups[rank]).openers
        use_lanes(groups[rank], Lanes(openers={peer: known[peer] for peer in senders}))
    for rank, takers in ((0, {2, 3}), (1, {2})):
        use_lanes(groups[rank], Lanes(lanes_of(groups[rank]).own, frozenset(takers)))
    order = [(t, s, 2 + (s + d) % 3) for t, d, s in product(range(5), range(3), range(2))]
    weights = {at: noise(700, seed=index) for index, at in enumerate(order)}
    held = {at: torch.zeros(700) for at in order}

    def sender(rank: int) -> None:
        mine = [message(to, weights[t, s, to]) for t, s, to in order if s == rank]
        send(groups[rank], mine, CPU)

    def receiver(rank: int) -> None:
        mine = [message(s, held[t, s, to]) for t, s, to in order if to == rank]
        receive(groups[rank], mine, CPU)

    for _ in range(2):  # a second weight sync finds nothing of the first
        sides = [lambda r=r: sender(r) for r in (0, 1)] + [
            lambda r=r: receiver(r) for r in (2, 3, 4)
        ]
        side_by_side(*sides)
        assert all(torch.equal(held[at], weights[at]) for at in order)
        for at in order:
            weights[at] += 1


def test_numbers_may_change_as_soon_as_they_are_sent():
    """What was packed is not used again before it is taken, and `send` returns no earlier."""
    groups = groups_with_lanes(2, 1)
    weights, held = noise(5000), torch.zeros(5000)

    def send_and_change() -> None:
        send(groups[0], [message(1, weights)], CPU)
        weights.fill_(float("nan"))

    def receive_late() -> None:
        time.sleep(0.2)
        receive(groups[1], [message(0, held)], CPU)

    side_by_side(send_and_change, receive_late)
    assert torch.equal(held, noise(5000))


@pytest.mark.parametrize("silent", ["receiver", "sender"])
def test_a_peer_that_never_comes_is_an_error_within_the_timeout(silent: str):
    limit_s = 1.5
    one, other = groups_with_lanes(2, 1, limit_s)
    started = time.monotonic()
    waits = {
        # a small message: sockets hold it, but nobody says that it was taken
        "receiver": lambda: send(one, [message(1, noise(10))], CPU),
        "sender": lambda: receive(other, [message(0, noise(10))], CPU),
    }
    with pytest.raises(PeerLost, match=r"rank [01] of the group: (?i:.*timed out|.*timeout)") as e:
        waits[silent]()
    assert e.value.peer == {"receiver": 1, "sender": 0}[silent]
    assert time.monotonic() - started < 6 * limit_s


def test_small_messages_share_a_leg_and_order_is_kept():
    """Those of one dtype, to one rank, as many as a leg holds; and none of ranks without a lane."""
    groups = groups_with_lanes(3, 1)
    use_lanes(groups[0], Lanes(lanes_of(groups[0]).own, frozenset({1})))
    use_lanes(groups[2], NONE)
    rung: list[tuple[int, int]] = []

    class Told:
        """Notes the bytes of what is sent."""

        def __init__(self, group: ProcessGroupGloo) -> None:
            self.group = group

        def __getattr__(self, name: str) -> Any:
            return getattr(self.group, name)

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            rung.append((peer, tensors[0].nbytes))
            return self.group.send(tensors, peer, tag)

    told: Any = Told(groups[0])
    use_lanes(told, lanes_of(groups[0]))
    sizes = [(1, 4), (2, 4), (1, 20), (1, 8), (2, 4), (1, 1), (1, 3), (1, 100)]
    sent = [noise(size, seed=index) for index, (_, size) in enumerate(sizes)]
    sent[5] = sent[5].to(HALF)
    held = [torch.zeros_like(numbers) for numbers in sent]
    to = [message(p, n, dtype=n.dtype) for (p, _), n in zip(sizes, sent, strict=True)]
    of = {
        r: [message(0, h, dtype=h.dtype) for (p, _), h in zip(sizes, held, strict=True) if p == r]
        for r in (1, 2)
    }
    side_by_side(
        lambda: send(told, to, CPU),
        lambda: receive(groups[1], of[1], CPU),
        lambda: receive(groups[2], of[2], CPU),
    )
    assert all(torch.equal(a, b) for a, b in zip(sent, held, strict=True))
    bell = (1, DESCRIPTOR_BYTES)
    # 4 + 20 + 8 numbers fill a leg of 128 bytes; 1 of another dtype; 3; 100 take four legs
    assert rung == [bell, (2, 16), (2, 16), bell, bell, *[bell] * 4]


class Sized:
    """An opener of ones: as many bytes as a descriptor's first one."""

    def nbytes(self, descriptor: bytes) -> int:
        return descriptor[0]

    def copy(self, descriptor: bytes, offset: int, view: torch.Tensor, dtype: torch.dtype) -> None:
        view.fill_(1)

    def taken(self) -> None: ...


class Bells:
    """A group whose every leg has these bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.left = list(sizes)
        self.acknowledged = 0

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        tensors[0][0] = self.left.pop(0)
        return self

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.acknowledged += 1
        return self

    def wait(self) -> None: ...


def inbox_of(bells: Bells, *views: torch.Tensor) -> Inbox:
    group: Any = bells
    nbytes = sum(view.nbytes for view in views)
    return Inbox(group, 0, Sized(), ((view, view.dtype) for view in views), nbytes)


def test_legs_are_taken_until_what_is_waited_for_is_there():
    held = [torch.zeros(3), torch.zeros(2, dtype=HALF), torch.zeros(5)]
    bells = Bells([8, 8, 8, 12])
    inbox = inbox_of(bells, *held)
    assert len(bells.left) == 3, "it listens before it is asked"
    inbox.reach(12)
    assert [view.sum() for view in held] == [3, 2, 0]
    assert bells.acknowledged == 2
    inbox.reach(16)
    assert bells.acknowledged == 2, "that came already"
    inbox.reach(36)
    inbox.end()
    assert [view.sum() for view in held] == [3, 2, 5]
    assert (bells.left, bells.acknowledged) == ([], 4)


@pytest.mark.parametrize("nbytes", [0, 24, 6])
def test_a_leg_of_other_bytes_than_are_to_come_is_refused(nbytes: int):
    held, bells = torch.zeros(5), Bells([nbytes, 4])
    inbox = inbox_of(bells, held)
    with pytest.raises(
        BadDescriptor, match=f"{nbytes} bytes, (of 20 that are to|which end within)"
    ):
        inbox.reach(20)
    assert bells.acknowledged == 0


def held_by_this_process() -> tuple[int, int]:
    """(open files, mappings of memory that ranks share)."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(os.listdir("/proc/self/fd")), maps.count(host_lane.NAME)


def test_lanes_end_with_their_group():
    """Neither files nor mappings are left, whether a group was left or only dropped."""

    def one_group(*, leaves: bool) -> None:
        groups = groups_with_lanes(2, 1)
        got = torch.zeros(100)
        side_by_side(
            lambda: send(groups[0], [message(1, noise(100))], CPU),
            lambda: receive(groups[1], [message(0, got)], CPU),
        )
        assert torch.equal(got, noise(100))
        for group in groups if leaves else ():
            forget_lanes(group)

    one_group(leaves=True)
    before = held_by_this_process()
    for turn in range(10):
        one_group(leaves=turn % 2 == 0)
    assert held_by_this_process() == before


def test_a_hundred_lanes_leave_nothing():
    before = held_by_this_process()
    for _ in range(100):
        lane = host_lane.HostLane()
        opener = host_lane.HostOpener(lane.export(lane.memory[:16]))
        lane.hide()
        del lane, opener
    assert held_by_this_process() == before
