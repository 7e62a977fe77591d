"""What a group of NCCL is asked for, by one that records it; tests/gpu runs the real one."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_bridge.weights.exchange import Message, PassedOn, PeerLost, receive, relay, send
from sglang_bridge.weights.posting import SOONER, leave, meet
from tests.support.receiving import CPU

TIMEOUT_S = 30.0


class Batch(dist.Work):
    """What NCCL returns for a batch."""

    def __init__(self, group: "Recorder") -> None:
        super().__init__()
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        assert timeout is not None, "on NCCL it would neither block nor raise"
        self._group.waits.append(timeout.total_seconds())
        if self._group.lost:
            raise dist.DistBackendError("[Rank 0] Watchdog caught a timeout. And more")
        return True


class Recorder:
    """Stands for a ProcessGroup of NCCL on the CPU. lost: every wait ends as NCCL's does then."""

    def __init__(self, *, lost: bool = False, refuses: bool = False) -> None:
        self.lost, self.refuses = lost, refuses
        self.calls: list[str] = []
        self.waits: list[float] = []
        self.waited_before: list[int] = []

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, _: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=TIMEOUT_S)))

    def _start_coalescing(self, _: torch.device) -> None:
        self.calls.append("begin")

    def _end_coalescing(self, _: torch.device) -> Batch:
        self.calls.append("end")
        return Batch(self)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        if self.refuses:
            raise RuntimeError("no such rank")
        self.calls.append(f"send {peer}")
        self.waited_before.append(len(self.waits))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(f"recv {peer}")

    def allreduce(self, tensors: list[torch.Tensor]) -> Batch:
        self.calls.append("allreduce")
        return Batch(self)

    def abort(self) -> None:
        self.calls.append("abort")


def messages(*peers: int) -> list[Message]:
    return [Message(peer, ("t",), (torch.zeros(4),), torch.float32) for peer in peers]


def batches(*calls: str) -> list[str]:
    return [each for call in calls for each in ("begin", call, "end")]


def test_every_message_is_a_batch_of_its_own():
    group: Any = Recorder()
    send(group, messages(1, 2), CPU)
    receive(group, messages(2, 1), CPU)
    first, second = messages(1, 3)
    relay(group, [first, PassedOn(second, 0)], CPU)
    expected = ["send 1", "send 2", "recv 2", "recv 1", "recv 1", "send 3"]
    assert group.calls == batches(*expected)
    assert group.waits == [SOONER * TIMEOUT_S] * len(expected)


def test_beside_training_nothing_is_queued_behind_a_message():
    """With one hardware queue it would hold up the collectives that other ranks wait for."""
    group: Any = Recorder()
    send(group, messages(1, 2, 3), CPU, beside_training=True)
    assert group.waited_before == [0, 1, 2]
    send(group, messages(1, 2, 3), CPU)
    assert group.waited_before[3:] == [3, 3, 3]


def test_a_lost_peer_is_named_before_the_watchdog_ends_the_process():
    group: Any = Recorder(lost=True)
    for act in (send, receive):
        with pytest.raises(PeerLost) as caught:
            act(group, messages(7), CPU)
        assert caught.value.peer == 7
    assert max(group.waits) < TIMEOUT_S


def test_a_batch_that_failed_is_closed():
    group: Any = Recorder(refuses=True)
    with pytest.raises(PeerLost):
        send(group, messages(1), CPU)
    assert group.calls == ["begin", "end"]


def test_all_ranks_form_the_communicator_first():
    group: Any = Recorder()
    meet(group, CPU)
    assert group.calls == ["allreduce"]
    assert group.waits == [SOONER * TIMEOUT_S]
    with pytest.raises(RuntimeError):
        meet(Recorder(lost=True), CPU)


def test_a_group_that_is_left_is_aborted_first(monkeypatch: pytest.MonkeyPatch):
    group: Any = Recorder()
    monkeypatch.setattr(dist, "destroy_process_group", lambda one: one.calls.append("destroy"))
    leave(group)
    assert group.calls == ["abort", "destroy"]
