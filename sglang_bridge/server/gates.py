"""Records the weights of a token's experts beside their ids, in SGLang's own record of ids.

SGLang keeps an int32 row of k ids for each KV slot and layer. On a server that was told to keep
gates the rows are twice as wide: k ids, then the bits of their k float32 weights, in the same
order. So weights are copied, found again for a cached prefix and overwritten exactly as ids are.
Elsewhere nothing is hooked.

The weights are those that the experts' outputs are multiplied with: after the choice and the
renormalisation, in float32 whatever the model's number format, as SGLang computes them.

Axes: X inputs, L layers, k experts of a token.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_bridge.server.spec import GATES_VARIABLE

_weight_Xk: torch.Tensor | None = None  # of the layer that is choosing its experts


def kept() -> bool:
    """Returns whether this server was told to keep gates."""
    return os.environ.get(GATES_VARIABLE) == "1"


def around_record(original: Callable[..., None], record: Any, *args: Any, **kwargs: Any) -> None:
    """Makes SGLang's record of ids (and of nothing else) twice as wide."""
    if kwargs["name"] != "routed_experts":
        original(record, *args, **kwargs)
        return
    topk, on_device = kwargs["topk_size"], kwargs["device_topk_size"]
    if on_device != topk:
        raise ValueError(
            f"{GATES_VARIABLE} must not be set for a model whose shared experts SGLang fuses with "
            f"the others, got {on_device - topk} of them"
        )
    original(record, *args, **kwargs | {"topk_size": 2 * topk, "device_topk_size": 2 * topk})


def around_choice(
    original: Callable[..., Any], *, topk_weights: torch.Tensor, **kwargs: Any
) -> Any:
    """Holds the weights while SGLang records the ids that they belong to."""
    global _weight_Xk
    _weight_Xk = topk_weights
    try:
        return original(topk_weights=topk_weights, **kwargs)
    finally:
        _weight_Xk = None


def around_capture(
    original: Callable[..., None], config: Any, layer_id: int | None, expert_Xk: torch.Tensor
) -> None:
    """Records ids and weights as one row."""
    if _weight_Xk is None:
        raise RuntimeError("SGLang chose experts in a way that does not show their weights")
    original(config, layer_id, joined(expert_Xk, _weight_Xk))


def joined(expert_Xk: torch.Tensor, weight_Xk: torch.Tensor) -> torch.Tensor:
    """Returns int32 [X, 2k]: ids, then the bits of their weights."""
    bits_Xk = weight_Xk.float().contiguous().view(torch.int32)
    return torch.cat([expert_Xk.to(torch.int32), bits_Xk], dim=1)


def divided(row_XLk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `joined` put together: ids, and float32 weights."""
    topk = row_XLk.shape[-1] // 2
    bits_XLk = np.ascontiguousarray(row_XLk[..., topk:], dtype=np.int32)
    return row_XLk[..., :topk], bits_XLk.view(np.float32)
