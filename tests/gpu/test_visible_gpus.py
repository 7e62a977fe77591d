"""What a process sees that is given one GPU of this machine, as a server is."""

import os
import subprocess
import sys

import pytest
import torch

from megatron_opd.launch.gpus import gpus_here
from sglang_bridge.gpus import let_see

HAS_CUDA = torch.cuda.is_available()
SEES = """
import torch
print(*(torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_each_gpu_is_seen_alone():
    names = gpus_here()
    assert len(names) == torch.cuda.device_count()
    found: list[str] = []
    for name in names:
        environment = dict(os.environ)
        let_see(environment, (name,))
        child = [sys.executable, "-c", SEES]
        done = subprocess.run(child, env=environment, capture_output=True, text=True, check=True)
        (uuid,) = done.stdout.split()
        found.append(uuid)
    assert len(set(found)) == len(names)
