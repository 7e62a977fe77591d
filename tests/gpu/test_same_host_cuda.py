"""Weights between two processes that share a GPU, through CUDA IPC."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from sglang_bridge.ports import free_port
from tests.gpu.lane_rank import CASES
from tests.support.side_by_side import side_by_side

HAS_CUDA = torch.cuda.is_available()
LIMIT_S = 180


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("expandable", [False, True])
def test_numbers_go_from_process_to_process_on_one_gpu(*, expandable: bool, tmp_path: Path):
    """Also from a learner's expandable segments, of which the driver exports nothing."""
    settings = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    port, files = free_port(), [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    rank = [sys.executable, "-m", "tests.gpu.lane_rank"]
    commands = [[*rank, str(number), str(port), str(file)] for number, file in enumerate(files)]
    side_by_side(commands, [settings, None], LIMIT_S)
    sender, receiver = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    assert (sender["lane"], receiver["lane"]) == (True, True), "it went through the group"
    assert receiver["wrong"] == []
    # the ring's allocation, and at most one of each tensor: not one of each message and round
    most = 1 if expandable else 1 + len(CASES)
    assert min(2, most) <= receiver["opened"] <= most
