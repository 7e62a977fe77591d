"""Lets attention whose heads SGLang's rotary kernel does not know store its keys and values itself.

On a GPU, with a bfloat16 KV cache, this SGLang's models with experts let that kernel store both.
For heads of other than 64, 128, 256 or 512 numbers there is another kernel, which cannot, and a
server ends by an assertion before it is ready.
"""

from __future__ import annotations

import torch


def store_apart(model: torch.nn.Module) -> None:
    """Tell every attention of `model` that has the other kernel so; call once it is loaded."""
    for module in model.modules():
        rotary = getattr(module, "rotary_emb", None)
        asks = getattr(module, "compatible_with_fused_kv_buffer", False)
        if asks and getattr(rotary, "use_fallback_kernel", False):
            module.compatible_with_fused_kv_buffer = False  # type: ignore[assignment]
