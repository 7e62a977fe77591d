"""Heads that SGLang's rotary kernel does not know: keys and values are stored apart from it."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from sglang_bridge.server.compat.rotary import store_apart
from sglang_bridge.server.entry import offer_standins

offer_standins()


def attention(*, fallback: bool, asks: bool = True) -> torch.nn.Module:
    """The two attributes by which SGLang's attention decides."""
    module = torch.nn.Module()
    module.rotary_emb = SimpleNamespace(use_fallback_kernel=fallback)  # type: ignore[assignment]
    if asks:
        module.compatible_with_fused_kv_buffer = True  # type: ignore[assignment]
    return module


def test_only_an_attention_with_the_other_kernel_stores_apart():
    known, other, plain = (
        attention(fallback=False),
        attention(fallback=True),
        attention(fallback=True, asks=False),
    )
    store_apart(torch.nn.Sequential(known, torch.nn.Sequential(other, plain)))
    assert known.compatible_with_fused_kv_buffer is True
    assert other.compatible_with_fused_kv_buffer is False
    assert not hasattr(plain, "compatible_with_fused_kv_buffer")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("sglang.srt.models.qwen3_moe", "and self.compatible_with_fused_kv_buffer"),
        ("sglang.srt.layers.rotary_embedding.base", "self.use_fallback_kernel = True"),
        (
            "sglang.srt.layers.rotary_embedding.base",
            "save kv cache is not supported for fallback_rotary_embedding",
        ),
    ],
)
def test_sglang_decides_by_them_still(module: str, words: str):
    assert words in inspect.getsource(importlib.import_module(module))
