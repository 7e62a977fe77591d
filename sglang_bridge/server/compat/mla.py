"""Serves multi-head latent attention (MLA): on a CPU, and after a weight sync.

On a CPU this SGLang makes no rotary positions without YaRN, and lets torch's attention read the
latent pool as if it held keys. Both are mended here, and neither is touched where CUDA is.

Attention reads no kv_b_proj: SGLang keeps its two halves as copies of their own (w_kc, w_vc), which
DeepseekV2WeightLoaderMixin.post_load_weights makes. SGLang calls that at the end of a weight
update: by itself for weights that it did not load, layer by layer for those that it did. No digest
of a parameter sees whether it has, so whoever asks for digests has the copies compared too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"
BACKEND = "torch_native"


class StaleCopies(RuntimeError):
    """Reports that attention computes with other weights than kv_b_proj holds."""


def around_rope(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes rotary positions that are not stretched, which SGLang asserts away on a CPU."""
    sizes = head_size, rotary_dim, max_position, base, is_neox_style
    if rope_scaling is not None:
        return original(*sizes, rope_scaling, *args, **kwargs)
    from sglang.srt.layers.rotary_embedding import factory

    return factory.get_rope(*sizes)  # type: ignore[arg-type]


def always_absorb() -> None:
    """Lets torch's attention compute in latent space, prefills too; call once a model is loaded.

    Nothing happens where no model's file that has MLA was imported. SGLang takes an attention that
    it does not know for Triton's, which reads keys and values of a prefill from the batch; torch's
    reads the pool.
    """
    handlers = sys.modules.get(HANDLERS)
    if handlers is not None:
        registry = handlers.AttentionBackendRegistry
        registry.register(BACKEND, handlers._dispatch_mla_subtype)


def require_current(model: torch.nn.Module) -> None:
    """Raises StaleCopies unless every copy holds what its kv_b_proj holds, in this rank's heads."""
    for name, module in model.named_modules():
        for held, copy in _copies(module):
            if not torch.equal(held, copy):
                raise StaleCopies(
                    f"{name}: what SGLang derived from kv_b_proj (w_kc, w_vc) was not made again "
                    "after a weight sync: it samples from other weights than it holds"
                )


def _copies(module: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (part of kv_b_proj, copy of it) of a layer with MLA, as [heads, features, rank].

    A checkpoint that SGLang quantises has copies of another dtype, and no weight sync writes it.
    """
    keys, values = getattr(module, "w_kc", None), getattr(module, "w_vc", None)
    if not (isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)):
        return
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    weight = module.kv_b_proj.weight.data
    if weight.dtype != keys.dtype:
        return
    for_keys, for_values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    yield for_keys, keys
    yield for_values, values.transpose(1, 2)
