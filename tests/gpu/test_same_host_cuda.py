"""Weights between two processes that share a GPU, through CUDA IPC."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_bridge.ports import free_port
from tests.gpu.lane_rank import CASES
from tests.support.paths import ROOT

HAS_CUDA = torch.cuda.is_available()
LIMIT_S = 180


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_numbers_go_from_process_to_process_on_one_gpu(tmp_path: Path):
    port, files = free_port(), [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    command = [sys.executable, "-m", "tests.gpu.lane_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port), str(files[rank])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-3000:] for text in said)
    sender, receiver = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    assert (sender["lane"], receiver["lane"]) == (True, True), "it went through the group"
    assert receiver["wrong"] == []
    # the ring's allocation, and at most one of each tensor: not one of each message and round
    assert 2 <= receiver["opened"] <= 1 + len(CASES)
