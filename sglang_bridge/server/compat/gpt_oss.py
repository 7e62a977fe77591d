"""Lets SGLang load gpt-oss in the server's number format, over ranks, and expert by expert.

This SGLang makes some layers in the format that config.json names, whatever the server's, and gives
ranks that hold some experts the tensors of all: neither server gets ready. Tensors of one expert,
as a broadcast brings them, it drops without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from sglang_bridge.server.pieces import by_name, pieces

MODEL = "GptOssForCausalLM"
_ONE_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


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


def take_single_experts(model: Any) -> None:
    """Let a model's load_weights know tensors of one expert too; call once it is loaded."""
    if type(model).__name__ != MODEL:
        return
    load: Callable[[Any], Any] = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        every, others = by_name(pieces(model)), list[tuple[str, torch.Tensor]]()
        for name, tensor in weights:
            if not _ONE_EXPERT.search(name):
                others.append((name, tensor))
            elif (piece := every.get(name)) is not None:  # another rank's otherwise
                piece.view.copy_(tensor.narrow(piece.dim, piece.start, piece.length))
        return load(others, *args, **kwargs)

    model.load_weights = load_weights
