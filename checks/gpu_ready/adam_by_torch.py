"""TransformerEngine's FusedAdam, its kernels computed by torch, and Megatron's offloading of it.

The class is its own: which states there are, of which type, and what a kernel is given. Megatron's
optimizer for a part on the host asks tensors where they are; here those that were copied with
cpu() are on the host and all others on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer
from torch.overrides import TorchFunctionMode
from transformer_engine.pytorch.optimizers import fused_adam

from checks.gpu_ready.results import joined


def step_of(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    numbers: tuple[Any, ...],
) -> torch.Tensor:
    """Return the new weight in float32, and leave new moments in place.

    numbers: learning rate, betas, epsilon, step, whether decay is decoupled, whether moments are
    corrected for their start, decay.
    """
    lr, beta1, beta2, eps, step, decoupled, corrected, decay = numbers
    assert decoupled
    m, v = moments
    g, w = gradient.float(), weight.float()
    mean = beta1 * m.float() + (1 - beta1) * g
    square = beta2 * v.float() + (1 - beta2) * g * g
    m.copy_(mean)
    v.copy_(square)
    if corrected:
        mean, square = mean / (1 - beta1**step), square / (1 - beta2**step)
    return w - lr * (mean / (square.sqrt() + eps) + decay * w)


def _adam(_: int, __: torch.Tensor, lists: Any, *numbers: Any) -> None:
    """Gradients, weights, moments and, of weights in 16 bits, main weights in float32."""
    for gradient, weight, m, v, *main in zip(*lists, strict=True):
        new = step_of(gradient, main[0] if main else weight, (m, v), numbers)
        for held in (weight, *main):
            held.copy_(new)


def _adam_remainder(_: int, __: torch.Tensor, lists: Any, *numbers: Any) -> None:
    """Weights in bfloat16 and, of the same numbers in float32, the lower 16 bits (results.joined).

    Ties are rounded away from zero, where torch rounds them to an even number.
    """
    for gradient, weight, m, v, low in zip(*lists, strict=True):
        new = step_of(gradient, joined(weight, low), (m, v), numbers).view(torch.int32)
        low.copy_(((new & 0xFFFF) ^ 0x8000) - 0x8000)
        weight.view(torch.int16).copy_((new >> 16) + (low < 0).int())


def _none(*_: Any) -> None:
    raise AssertionError("a kernel that no case here should want")


class _CopiesAreOnTheHost(TorchFunctionMode):
    """Makes tensors say that they are on a GPU, but for those that cpu() gave."""

    def __init__(self) -> None:
        super().__init__()
        self.on_host: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return all(each is not args[0] for each in self.on_host)
        if func is torch.Tensor.pin_memory:
            return args[0]
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            self.on_host.append(found)
        return found


def install() -> None:
    """Put them in place, in this process."""
    kernels = SimpleNamespace(
        multi_tensor_adam=_adam,
        multi_tensor_adam_param_remainder=_adam_remainder,
        multi_tensor_adam_fp8=_none,
        multi_tensor_adam_capturable=_none,
        multi_tensor_adam_capturable_master=_none,
    )
    held: Any = fused_adam
    held.tex = kernels
    hybrid: Any = hybrid_optimizer.HybridDeviceOptimizer
    divide = hybrid._get_sub_optimizer_param_groups

    def divided(*given: Any) -> Any:
        with _CopiesAreOnTheHost():
            return divide(*given)

    hybrid._get_sub_optimizer_param_groups = divided
