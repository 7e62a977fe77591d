"""One of two ranks on one GPU, of a gloo group: python -m tests.gpu.lane_rank RANK PORT OUT."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from sglang_bridge.weights.device_lane import DeviceLane, DeviceOpener
from sglang_bridge.weights.exchange import Message, receive, send
from sglang_bridge.weights.lanes import LEG_BYTES
from sglang_bridge.weights.same_host import find_lanes

LIMIT = timedelta(seconds=60)
ROUNDS = 3
# [rows, columns], in one piece or not at either end, dtype that travels
CASES = (
    ((4096, 2048), True, True, torch.float32),  # opened where it lies
    ((64, 64), True, True, torch.float32),  # small ones share a leg
    ((64, 33), False, True, torch.float32),
    ((LEG_BYTES // 4096, 2500), False, False, torch.float32),  # several legs
    ((1000, 1000), True, False, torch.bfloat16),  # cast on the sender
    ((7, 3), True, True, torch.bfloat16),
)


def tensor_of(shape: tuple[int, int], dtype: torch.dtype, *, dense: bool) -> torch.Tensor:
    """Zeros on the GPU, in one piece or in the midst of other memory."""
    rows, columns = shape
    whole = torch.zeros(rows, columns + (0 if dense else 5), dtype=dtype, device="cuda")
    return whole[:, :columns]


def numbers_of(case: int, turn: int) -> torch.Tensor:
    """What case `case` holds in a round, on the CPU: whole numbers that bfloat16 holds too."""
    shape = CASES[case][0]
    count = shape[0] * shape[1]
    return ((torch.arange(count) * (turn + 1) + case) % 251).float().view(shape)


def main() -> None:
    """Entry point: writes {lane, pointers_opened, wrong} to OUT."""
    rank, port, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    store = TCPStore("127.0.0.1", port, 2, rank == 0, LIMIT)
    group = ProcessGroupGloo(store, rank, 2, LIMIT)
    lanes = find_lanes(group, device, sends=rank == 0, receives=rank == 1)
    lane = isinstance(lanes.own, DeviceLane) and lanes.takers == {1}
    lane = lane or isinstance(lanes.openers.get(0), DeviceOpener)
    held = [
        tensor_of(shape, torch.float32 if rank == 0 else dtype, dense=(here, there)[rank])
        for shape, here, there, dtype in CASES
    ]
    messages = [
        Message(1 - rank, (f"case{index}",), (view,), CASES[index][3])
        for index, view in enumerate(held)
    ]
    wrong: list[str] = []
    for turn in range(ROUNDS):
        if rank == 0:
            for index, view in enumerate(held):
                view.copy_(numbers_of(index, turn))
            send(group, messages, torch.device("cpu"))
            for view in held:
                view.fill_(-1)  # nobody reads them any more
            continue
        receive(group, messages, torch.device("cpu"))
        for index, view in enumerate(held):
            if not torch.equal(view.float().cpu(), numbers_of(index, turn)):
                wrong.append(f"case {index} of round {turn}")
    opener = lanes.openers.get(0)
    opened = len(opener._pointers) if isinstance(opener, DeviceOpener) else 0
    found = {"lane": lane, "opened": opened, "wrong": wrong}
    out.write_text(json.dumps(found), encoding="utf-8")
    group.barrier().wait()  # memory stays until the other one has read it


if __name__ == "__main__":
    main()
