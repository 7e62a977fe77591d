"""Makes updates bitwise the same whenever they are made again (`run.deterministic`).

On a CPU they are so by themselves: every sum has one order, which depends on the batch and the
layout alone. On a GPU some kernels add in the order in which threads arrive.
"""

from __future__ import annotations

import os

import torch

from megatron_opd.config.learner import LearnerConfig

ENVIRONMENT = {
    # TransformerEngine: no kernels whose backward pass adds atomically
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # cuBLAS: workspaces of fixed size, because concurrent streams otherwise share one
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # one order of addition, whatever the message's size
    "NCCL_ALGO": "Ring",
}


def deterministic(config: LearnerConfig) -> LearnerConfig:
    """Return `config` for a process with repeatable updates; call before CUDA is used.

    On a GPU an operation that cannot be repeated then raises RuntimeError, and what the user set in
    the environment is kept.
    """
    if not torch.cuda.is_available():
        return config
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    return config.model_copy(update={"megatron": {**config.megatron, "deterministic_mode": True}})
