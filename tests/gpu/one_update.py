"""`python -m tests.gpu.one_update OUT MODEL DTYPE local|installed`: tests/dist/precision_jobs.py.

A process of its own: whether CUDA is visible is decided when torch first asks.
"""

import sys
from pathlib import Path

import torch

from sglang_bridge.imports import keep_out

if __name__ == "__main__":
    if not torch.cuda.is_available():
        keep_out("transformer_engine")  # Megatron would take its kernels, which need a GPU
    from tests.dist.precision_jobs import one_update

    out, model, dtype, kernels = sys.argv[1:]
    one_update(Path(out), model=model, dtype=dtype, local=kernels == "local")
