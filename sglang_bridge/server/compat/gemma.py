"""Makes SGLang scale Gemma's embeddings as transformers does."""

from __future__ import annotations

import torch

EMBEDDING = "Gemma3TextScaledWordEmbedding"


def round_scales(model: torch.nn.Module) -> None:
    """Rounds what embeddings are multiplied by to their dtype; call once a model is loaded.

    SGLang multiplies by the exact root of hidden_size: in bfloat16 up to 0.2% off what the model
    was trained with.
    """
    for module in model.modules():
        if type(module).__name__ == EMBEDDING:
            scale = torch.tensor(module.embed_scale, dtype=module.weight.dtype)  # type: ignore[arg-type]
            module.embed_scale = scale.item()  # type: ignore[assignment]
