"""Runs Megatron-Core 0.19.2 on plain CPU tensors over gloo; with CUDA it changes nothing.

Megatron names CUDA in about sixty places that no configuration reaches: `device="cuda"` literals,
`torch.cuda.current_device()`, type names such as `torch.cuda.FloatTensor` in its optimizers, CUDA
random states, streams. Each is answered here with its CPU meaning, so that Megatron itself stays
unmodified; the gradient norm, which a CPU adds up badly, is replaced by devices/grad_norm.py, and
devices/alone.py leaves out collectives of one rank, of which gloo makes copies.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_opd.learner.devices.alone import patch_collectives
from megatron_opd.learner.devices.grad_norm import multi_tensor_l2_norm
from sglang_bridge.freed import give_back_freed

CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    return (
        device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"
    )


class CudaMeansCpu(TorchFunctionMode):
    """Makes `device="cuda"`, `Tensor.cuda()` and pinned memory mean ordinary CPU memory.

    Thread-local: a thread that runs Megatron must enter a mode of its own.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Redirect one torch call."""
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(out, str):
            # Megatron's optimizers sort parameters by the type's name and refuse any other.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron.core.optimizer"):
                return out.replace("torch.", "torch.cuda.", 1)
        return out


class _NoStream:
    """Stands in for a CUDA stream or event where all runs in order: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *args, **kwargs: self


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _NoStream()
    cuda.Stream = _NoStream
    # One function each: torch's compiler, which Megatron may start, lists them by identity.
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *args: stream)
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, lambda *args: None)
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_device = lambda: CPU
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args: torch.get_rng_state()


def _patch_random_state() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    module: Any = megatron_random
    module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # The original queues the state until CUDA initialises, which never happens.
    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _patch_token_dispatcher() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # The original makes numpy split sizes of CUDA tensors only.
    module: Any = token_dispatcher
    module.maybe_move_tensor_to_cpu = to_host


def _patch_grad_norm() -> None:
    from megatron.core.optimizer import clip_grads

    # The name that get_grad_norm_fp32 looks up when it is called.
    module: Any = clip_grads
    module.l2_norm_impl = multi_tensor_l2_norm


def install() -> AbstractContextManager[Any]:
    """Prepare this process and return the context in which Megatron must run in this thread.

    Where CUDA is available the context does nothing and torch stays untouched.
    """
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    give_back_freed()
    _patch_torch_cuda()
    _patch_random_state()
    _patch_token_dispatcher()
    _patch_grad_norm()
    patch_collectives()
    return CudaMeansCpu()
