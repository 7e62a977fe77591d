"""Computes in torch what SGLang 0.5.23 computes by Triton kernels alone; for servers on a CPU.

Each replaces one function of SGLang, named in compat/hooks.py, and test_torch_kernels.py shows that
the original still fails there. On a GPU none is put in place.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_bridge.server.compat import hooks


def add_gated(
    x_TH: torch.Tensor, gate_H: torch.Tensor, shared_TH: torch.Tensor, out_TH: torch.Tensor
) -> None:
    """Adds what shared experts computed, times the sigmoid of their gate's logit, to out_TH."""
    out_TH += torch.sigmoid(functional.linear(x_TH, gate_H[None])) * shared_TH


def register() -> None:
    """Registers them with SGLang's plugins."""
    hooks.hook(hooks.SHARED_GATE, add_gated, "replace")
