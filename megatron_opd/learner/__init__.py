"""Trains the student with Megatron-Core."""

import os

import torch

from sglang_bridge.imports import keep_out

FOR_GPUS = ("fla", "flash_mla", "transformer_engine")
"""Megatron uses these wherever they are installed, transformers the first, on a CPU too, where they
cannot compute. flash_mla asks for the driver's library as it is imported, which a login node does
not have."""

if not torch.cuda.is_available():
    keep_out(*FOR_GPUS)
    # Read whenever torch.compile decorates a function, which Megatron does while it is imported, so
    # this must come first. On a CPU compilation costs more than it saves.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
