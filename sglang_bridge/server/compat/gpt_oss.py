"""Lets SGLang load gpt-oss in the server's number format, and split its experts over ranks.

This SGLang makes some layers in the format that config.json names, whatever the server's; and it
gives ranks that hold some experts the tensors of all, so that neither server gets ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

MODEL = "GptOssForCausalLM"


def use_dtype(config: Any) -> None:
    """Name the server's format in what its model reads as config.json. config: a ModelConfig."""
    if MODEL in config.hf_config.architectures:
        config.hf_config.dtype = config.dtype


def own_experts(
    model: Any, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors, those of all experts of a layer cut to this rank's.

    Of MXFP4 that is not de-quantised SGLang takes a rank's own by itself.
    """
    ours = type(model).__name__ == MODEL and model.quant_config is None
    layers: dict[str, Any] = dict(model.named_modules()) if ours else {}
    for name, tensor in weights:
        layer = layers.get(name.rpartition(".")[0])
        count = getattr(layer, "num_local_experts", None)
        if layer is not None and count is not None:
            tensor = tensor.narrow(0, layer.moe_ep_rank * count, count)
        yield name, tensor
