"""Serves attention with sinks (gpt-oss) on a CPU: torch's attention, which SGLang gives none.

SGLang's gpt-oss takes attentions of a list alone, by name. Of Triton's nothing runs on a CPU: its
name is given torch's with sinks, and nothing is touched where CUDA is. Windowed layers keep all
their keys and values: no pool of their own, whose slots torch's attention would have to translate.

Axes: H heads in groups that share one of h, T new tokens of a request, K all its tokens, d features
of a head.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from sglang_bridge.config_file import config_of

MODEL_TYPE = "gpt_oss"
PARAMETER = "sinks"
"""A parameter of attention: one number for each of this rank's heads."""
BACKEND = "triton"
ARGUMENTS = {"--attention-backend": BACKEND}
FLAGS = ("--disable-hybrid-swa-memory",)
DETERMINISTIC_FLAGS = ("--disable-radix-cache",)
"""What SGLang sees to itself with the attention that it knows as torch's: a cached prefix may have
been computed by decode steps, which round otherwise."""


def is_needed(model: Path) -> bool:
    """Return whether the model's config.json asks for sinks."""
    return config_of(model).get("model_type") == MODEL_TYPE


def register() -> None:
    """Let SGLang make torch's attention with sinks under Triton's name. RuntimeError: no such."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if BACKEND not in ATTENTION_BACKENDS:
        raise RuntimeError(f"SGLang has no attention {BACKEND}, whose name a CPU's takes")
    ATTENTION_BACKENDS[BACKEND] = lambda runner: attention_class()(runner)


def keep_exact(model: torch.nn.Module) -> None:
    """Hold sinks in the model's dtype, where SGLang has bfloat16; call before they are loaded."""
    for module in model.modules():
        sinks = getattr(module, PARAMETER, None)
        if isinstance(sinks, torch.nn.Parameter):
            exact = sinks.data.to(module.qkv_proj.weight.dtype)  # type: ignore[union-attr]
            module.sinks = torch.nn.Parameter(exact, requires_grad=False)


def attend(
    query_HTd: torch.Tensor,
    key_hKd: torch.Tensor,
    value_hKd: torch.Tensor,
    sinks_H: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return [H, T, d]: what the last T of K tokens read.

    window: how many tokens before its own a token reads; None: all.
    """
    heads, count, total = query_HTd.shape[0], query_HTd.shape[1], key_hKd.shape[1]
    key_HKd, value_HKd = (x.repeat_interleave(heads // len(x), 0) for x in (key_hKd, value_hKd))
    own = torch.arange(total - count, total)[:, None]
    other = torch.arange(total)
    hidden = other > own
    if window is not None:
        hidden |= other < own - window
    logits = (query_HTd @ key_HKd.mT * scale).masked_fill(hidden, -torch.inf)
    sink = sinks_H.to(logits.dtype)[:, None, None].expand(-1, count, 1)
    shares = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    return shares @ value_HKd


@cache
def attention_class() -> type:
    """Return the class of SGLang's torch attention that takes sinks."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class SinkAttention(TorchNativeAttnBackend):
        """Reads the pool of keys and values, one request after the other."""

        def forward_extend(self, *args: Any, **options: Any) -> torch.Tensor:
            """Return what the new tokens of each request read."""
            return self._read(*args, **options)

        def forward_decode(self, *args: Any, **options: Any) -> torch.Tensor:
            """Return what one more token of each request reads."""
            return self._read(*args, **options)

        def _read(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            batch: Any,
            save_kv_cache: bool = True,
            *,
            sinks: torch.Tensor,
        ) -> torch.Tensor:
            """Return [tokens, H d]."""
            pool: Any = self.token_to_kv_pool
            requests: Any = self.req_to_token_pool
            table = requests.req_to_token
            if save_kv_cache:
                pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
            held = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            totals = batch.seq_lens.tolist()
            decodes = batch.forward_mode.is_decode()
            counts = [1] * len(totals) if decodes else batch.extend_seq_lens.tolist()
            window = layer.sliding_window_size if layer.sliding_window_size >= 0 else None
            parts = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(counts)
            found: list[torch.Tensor] = []
            for part, total, row in zip(parts, totals, batch.req_pool_indices, strict=True):
                key, value = (x[table[row, :total]].to(q.dtype).transpose(0, 1) for x in held)
                read = attend(part.transpose(0, 1), key, value, sinks, layer.scaling, window)
                found.append(read.transpose(0, 1).flatten(1))
            return torch.cat(found)

    return SinkAttention
