"""`python -m tests.gpu.one_update OUT MODEL DTYPE local|installed`: tests/dist/precision_jobs.py.

A process of its own: whether CUDA is visible is decided when torch first asks.
"""

import sys
from pathlib import Path

from tests.dist.precision_jobs import one_update

if __name__ == "__main__":
    out, model, dtype, kernels = sys.argv[1:]
    one_update(Path(out), model=model, dtype=dtype, local=kernels == "local")
