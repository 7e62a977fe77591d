"""All ranks come to the same lanes, whatever prevents them."""

import errno
import logging
import threading
import time

import pytest
import torch

from sglang_bridge.weights import host_lane, same_host
from sglang_bridge.weights.exchange import Message, PeerLost, receive, send
from sglang_bridge.weights.lanes import NONE, BadDescriptor, forget_lanes, lanes_of
from sglang_bridge.weights.same_host import find_lanes
from tests.support.receiving import CPU, gloo_groups
from tests.support.same_host import groups_with_lanes, side_by_side


def require_that_weights_arrive(groups: list) -> None:
    """From the first rank to the last."""
    sent, held = torch.arange(1000.0), torch.zeros(1000)
    to, of = (
        Message(len(groups) - 1, ("a",), (sent,), sent.dtype),
        Message(0, ("a",), (held,), sent.dtype),
    )
    side_by_side(
        lambda: send(groups[0], [to], CPU),
        lambda: receive(groups[-1], [of], CPU),
    )
    assert torch.equal(sent, held)


def test_senders_and_receivers_of_one_host_find_each_other():
    groups = groups_with_lanes(4, 2)
    found = [lanes_of(group) for group in groups]
    assert [lane.takers for lane in found] == [{2, 3}, {2, 3}, set(), set()]
    assert [set(lane.openers) for lane in found] == [set(), set(), {0, 1}, {0, 1}]
    assert [lane.own is not None for lane in found] == [True, True, False, False]
    require_that_weights_arrive(groups)
    forget_lanes(groups[0])
    assert lanes_of(groups[0]) is NONE


def test_ranks_of_other_hosts_share_nothing(monkeypatch: pytest.MonkeyPatch):
    """Three hosts: that of ranks 0 and 3, and one of each other."""
    asked = threading.local()
    hosts = {0: b"a" * 32, 1: b"b" * 32, 2: b"c" * 32, 3: b"a" * 32}
    monkeypatch.setattr(same_host, "_host", lambda: hosts[asked.rank])
    groups = gloo_groups(4, 30)

    def join(rank: int) -> None:
        asked.rank = rank
        find_lanes(groups[rank], CPU, sends=rank < 2, receives=rank >= 2)

    side_by_side(*(lambda r=rank: join(r) for rank in range(4)))
    found = [lanes_of(group) for group in groups]
    assert [lane.takers for lane in found] == [{3}, set(), set(), set()]
    assert [set(lane.openers) for lane in found] == [set(), set(), set(), {0}]
    assert found[1].own is None, "memory for nobody"
    require_that_weights_arrive(groups)


def test_the_host_is_named_by_kernel_processes_and_user(monkeypatch: pytest.MonkeyPatch):
    here = same_host._host()
    assert (len(here), same_host._host()) == (32, here)
    monkeypatch.setattr(same_host.os, "geteuid", lambda: 12345)
    other = same_host._host()
    assert other != here
    monkeypatch.setattr(same_host, "PROCESSES", "/proc/self/ns/net")
    assert same_host._host() not in (here, other)
    monkeypatch.setattr(same_host, "PROCESSES", "/proc/self/ns/none")
    assert same_host._host() != same_host._host(), "what cannot be told is nobody's"


def test_memory_that_does_not_open_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> None:
        raise BadDescriptor("not yours")

    monkeypatch.setattr(host_lane, "_require_sound", refuse)
    groups = groups_with_lanes(3, 1)
    assert not lanes_of(groups[0]).takers
    assert not lanes_of(groups[2]).openers
    said = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    refused = "the memory of rank 0 on this host did not open, its weights come through the group: "
    assert said == [refused + "not yours"] * 2, "once for each receiver"
    require_that_weights_arrive(groups)


def test_memory_with_other_contents_than_were_offered_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As of another process that has the sender's number in another namespace."""
    monkeypatch.setattr(host_lane.HostOpener, "copy", lambda self, d, o, view, t: view.zero_())
    groups = groups_with_lanes(2, 1)
    assert (lanes_of(groups[0]).takers, lanes_of(groups[1]).openers) == (set(), {})
    assert "other memory than was offered" in caplog.text


def test_without_memory_everything_goes_through_the_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_lane.os, "posix_fallocate", full)
    groups = groups_with_lanes(2, 1)
    assert lanes_of(groups[0]) == NONE == lanes_of(groups[1])
    (said,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert said.startswith("no memory to share on this host, weights go through the group: [Errno")
    require_that_weights_arrive(groups)


def test_a_rank_that_stays_away_is_an_error_within_the_timeout():
    one, _ = gloo_groups(2, 1.0)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="the ranks did not agree on how to send on one host"):
        find_lanes(one, CPU, sends=True)
    assert time.monotonic() - started < 10
    assert lanes_of(one) is NONE
