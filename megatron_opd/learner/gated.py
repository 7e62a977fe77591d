"""Computes a feed-forward block's SwiGLU while keeping its input alone for the backward pass.

Megatron's operations keep four tensors a layer for it: the first product's output, silu(gate), a
copy of the other half (to which it adds an offset, zero) and the result. Its fused kernels, which
keep two, are for GPUs. Here silu(gate) is computed again. Values and gradients are the same, bit
for bit but for the sign of a zero. Gates of GELU by its tanh formula are computed likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

Activation = Callable[[torch.Tensor], torch.Tensor]


def gelu(gate: torch.Tensor) -> torch.Tensor:
    """Return GELU by its tanh formula, Hugging Face's gelu_pytorch_tanh."""
    return F.gelu(gate, approximate="tanh")


class _Gated(torch.autograd.Function):
    """Defines activation(gate) * up, of the two halves of the input's last dimension.

    activation: F.silu, or gelu of this module.
    """

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(both)
        ctx.activation = activation
        gate, up = both.chunk(2, dim=-1)
        return activation(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (both,), (grad,) = ctx.saved_tensors, grads
        gate, up = both.chunk(2, dim=-1)
        grad_both = torch.empty_like(both)
        grad_gate, grad_up = grad_both.chunk(2, dim=-1)
        torch.mul(grad, ctx.activation(gate), out=grad_up)
        if ctx.activation is gelu:
            torch.ops.aten.gelu_backward.grad_input(
                grad * up, gate, approximate="tanh", grad_input=grad_gate
            )
        else:
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_both, None


def swiglu(both: torch.Tensor, activation: Activation = F.silu) -> torch.Tensor:
    """Return activation(gate) * up, [..., f], of `both` = [gate, up], [..., 2 f].

    activation: F.silu, or gelu of this module. Differentiable once.
    """
    out: Any = _Gated.apply(both, activation)
    return out


def is_plain_swiglu(config: TransformerConfig) -> bool:
    """Return whether Megatron would compute activation(gate) * up by several operations."""
    return (
        config.gated_linear_unit
        and config.activation_func in (F.silu, gelu)
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0
        and not config.add_bias_linear
        and not config.bias_activation_fusion
        and not config.use_te_activation_func
    )


class GatedMLP(MLP):
    """Computes Megatron's feed-forward block, keeping one tensor for a plain SwiGLU's gradient.

    Experts' blocks get the weight of each token too, and are computed by Megatron.
    """

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: Any = None, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [s, b, h] to [s, b, h]; the second is the bias, None here."""
        if per_token_scale is not None and self.config.add_bias_linear:
            return self._scaled(hidden_states, per_token_scale), None
        if per_token_scale is not None or not is_plain_swiglu(self.config):
            return super().forward(hidden_states, per_token_scale, **named)
        first: Any = self.linear_fc1
        second: Any = self.linear_fc2
        both, _ = first(hidden_states)
        return second(swiglu(both, self.config.activation_func))

    def _scaled(self, rows_RH: torch.Tensor, scale_R: torch.Tensor) -> torch.Tensor:
        """Return what an expert with biases makes of its rows, times the weight of each.

        Megatron adds the last bias in place, which autograd refuses where one rank has the whole
        expert.
        """
        config, first, second = self.config, cast(Any, self.linear_fc1), cast(Any, self.linear_fc2)
        both, bias = first(rows_RH)
        gate, up = (both + bias).chunk(2, dim=-1)
        limit = config.activation_func_clamp_value
        assert limit is not None
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = config.activation_func(gate) * (up + config.glu_linear_offset)
        out, bias = second((inner * scale_R[:, None]).to(inner.dtype))
        return out + (bias * scale_R[:, None]).to(out.dtype)


class GatedSharedExperts(SharedExpertMLP, GatedMLP):
    """Computes the experts that every token visits so, and what their gate makes of it."""


def keep_less(model: torch.nn.Module) -> None:
    """Turn every feed-forward block of Megatron's in `model` into a GatedMLP."""
    turned: dict[type, type] = {MLP: GatedMLP, SharedExpertMLP: GatedSharedExperts}
    for module in model.modules():
        # Not a new module: parameters, their names and marks, and checkpoints stay as they are.
        module.__class__ = turned.get(type(module), type(module))
