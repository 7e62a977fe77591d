"""What two ranks on one host do in tests of lanes whose other end dies or stops."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest import mock

import torch

from sglang_bridge.weights.exchange import Message, PeerLost, receive, send
from sglang_bridge.weights.host_lane import HostOpener
from sglang_bridge.weights.lanes import LEG_BYTES
from sglang_bridge.weights.same_host import find_lanes
from tests.support.receiving import CPU, gloo_group

LEGS = 12  # more than a lane's memory holds


def lose(out: Path, *, victim: int, signal: int, timeout_s: float) -> None:
    """Rank 0 sends to rank 1, twice; the second time the victim gets `signal` in the middle.

    The other one notes after how many seconds it raised what.
    """
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    group = gloo_group(port, "lanes", rank, 2, timeout_s, listens=rank == 0)
    lanes = find_lanes(group, CPU, sends=rank == 0, receives=rank == 1)
    assert lanes.takers == ({1} if rank == 0 else set())
    numbers = torch.full((LEGS * LEG_BYTES // 4,), float(1 - rank))
    message = Message(1 - rank, ("w",), (numbers,), torch.float32)
    act = send if rank == 0 else receive
    act(group, [message], CPU)
    assert numbers.eq(1).all()
    left = LEGS // 2

    def struck() -> None:
        nonlocal left
        left -= 1
        if left == 0 and rank == victim:
            os.kill(os.getpid(), signal)

    export, copy = type(lanes.own).export if lanes.own else None, HostOpener.copy

    def exported(lane, *arguments):
        struck()
        return export(lane, *arguments)

    def copied(opener, *arguments):
        struck()
        copy(opener, *arguments)

    patched = (type(lanes.own), "export", exported) if lanes.own else (HostOpener, "copy", copied)
    began = time.monotonic()
    with mock.patch.object(*patched):
        try:
            act(group, [message], CPU)
            said = None
        except PeerLost as error:
            said = [error.peer, error.cause]
    found = {"said": said, "seconds": time.monotonic() - began}
    (out / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
