"""Runs SGLang on a plain CPU: PyTorch operators alone, no sgl_kernel.

Active only where the plugin is enabled and there is no CUDA. Entry-point group
`sglang.srt.platforms`; SGLang asks `activate` for the dotted name of a class and imports that
module only then, which keeps this one light on a GPU machine.
"""

from __future__ import annotations

import os

from sglang_bridge.server.spec import ENABLED_VARIABLE


def activate() -> str | None:
    """Returns the platform class to use, or None to leave SGLang's own choice alone."""
    if os.environ.get(ENABLED_VARIABLE) != "1":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return "sglang_bridge.server.cpu_platform:PlainCpuPlatform"
