"""One of the two processes of same_device.py.

    python -m checks.gpu.same_device_rank PORT DEVICE BYTES REPEATS RANK OUT

Rank 0 sends, rank 1 measures and writes OUT.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from sglang_bridge.weights.exchange import Message, receive, send
from sglang_bridge.weights.lanes import forget_lanes
from sglang_bridge.weights.same_host import find_lanes

TENSORS = 8
COLUMNS, BESIDE = 1024, 64
CPU = torch.device("cpu")  # where a gloo group has its buffers
LIMIT = timedelta(seconds=60)


def tensors(device: str, nbytes: int, *, dense: bool) -> list[torch.Tensor]:
    """TENSORS of float32 that are `nbytes` together, in one piece each or not."""
    rows = nbytes // (4 * COLUMNS * TENSORS)
    width = COLUMNS + (0 if dense else BESIDE)
    return [torch.ones(rows, width, device=device)[:, :COLUMNS] for _ in range(TENSORS)]


def main() -> None:
    """Entry point."""
    port, device, nbytes, repeats, rank, out = sys.argv[1:]
    sends = rank == "0"
    store = TCPStore("127.0.0.1", int(port), 2, sends, LIMIT)
    group = ProcessGroupGloo(store, int(rank), 2, LIMIT)
    lanes = find_lanes(group, torch.device(device), sends=sends, receives=not sends)
    ways: dict[str, list[float]] = {}
    for way, dense in (("where_it_lies", True), ("packed", False), ("through_group", True)):
        if way == "through_group":
            forget_lanes(group)
        held = tensors(device, int(nbytes), dense=dense)
        messages = [Message(1 - int(rank), ("w",), (view,), view.dtype) for view in held]
        ways[way] = [_seconds(group, messages, sends=sends) for _ in range(1 + int(repeats))][1:]
        del held, messages
    if not sends:
        found = {"lane": bool(lanes.openers), "ways": ways}
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    group.barrier().wait()  # memory stays until the other one has read it


def _seconds(group: ProcessGroupGloo, messages: list[Message], *, sends: bool) -> float:
    group.barrier().wait()
    began = time.perf_counter()
    if sends:
        send(group, messages, CPU)
    else:
        receive(group, messages, CPU)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    group.barrier().wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
