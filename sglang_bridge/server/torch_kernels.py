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


def times_gate(
    x_TH: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """Returns x times the sigmoid of the gate, which may be of shape [T, heads, features]."""
    if quant:
        raise NotImplementedError("a CPU has no fp8 output of attention")
    return x_TH * torch.sigmoid(gate.reshape(x_TH.shape))


def register() -> None:
    """Registers them with SGLang's plugins."""
    hooks.hook(hooks.OUTPUT_GATE, times_gate, "replace")
    hooks.hook(hooks.SHARED_GATE, add_gated, "replace")
