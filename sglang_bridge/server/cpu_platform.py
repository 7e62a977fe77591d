"""Defines the platform class behind `sglang_bridge.server.platform`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


def _allocate_unpinned(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Allocates a host buffer without cudaHostRegister, which needs CUDA."""
    return torch.empty(dims, dtype=dtype, device=device)


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Runs SGLang's CPU device operations with the torch-native attention backend.

    SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE) demands sgl_kernel's AVX-512 build; an
    out-of-tree platform with these defaults does not.
    """

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        """Selects attention by torch.nn.functional.scaled_dot_product_attention."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Selects the eager backend: nothing is compiled."""
        return "eager"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Returns False: there is no accelerator to pin host memory for."""
        return False

    def init_backend(self) -> None:
        """Replaces the pinned allocation of host-side buffers (returned routed experts)."""
        # Imported late: this module asks for the current platform while it is being resolved.
        from sglang.srt.mem_cache.pool_host import common

        common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unpinned
