"""What is mended for attention with sinks is still missing, and then equals transformers'."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from sglang_bridge.server.compat import sinks
from sglang_bridge.server.entry import arguments_for_device, offer_standins

offer_standins()

HEADS, SHARED, WIDTH, WINDOW = 6, 2, 8, 5


def transformers_read(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor, window: int
) -> torch.Tensor:
    """What transformers' attention gives the last of a sequence, [H, T, d]."""
    total, count = key.shape[1], query.shape[1]
    row, column = torch.arange(total)[:, None], torch.arange(total)
    hidden = (column > row) | (column <= row - window)
    mask = torch.zeros(total, total, dtype=query.dtype).masked_fill(hidden, -torch.inf)
    module = SimpleNamespace(sinks=sink, num_key_value_groups=HEADS // SHARED, training=False)
    read, _ = eager_attention_forward(
        module,  # type: ignore[arg-type]
        query[None], key[None], value[None], mask[-count:][None, None], WIDTH**-0.5,
    )  # fmt: skip
    return read[0].transpose(0, 1)


@pytest.mark.parametrize("count", [13, 4, 1])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_token_reads_what_transformers_has_it_read(count: int, window: int | None):
    """A whole prompt, the rest of one, one more token; float64."""
    torch.manual_seed(count)
    query = torch.randn(HEADS, count, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, SHARED, 13, WIDTH, dtype=torch.float64)
    sink = torch.randn(HEADS, dtype=torch.float64)
    # SGLang counts the tokens before a token's own, transformers that one too
    reach = None if window is None else window - 1
    found = sinks.attend(query, key, value, sink, WIDTH**-0.5, reach)
    expected = transformers_read(query, key, value, sink, window or 99)
    assert torch.allclose(found, expected, atol=1e-12)
    without = sinks.attend(query, key, value, sink - 1e9, WIDTH**-0.5, reach)
    assert not torch.allclose(found, without, atol=1e-3), "sinks count"


def test_sglang_still_has_no_such_attention():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("forward_extend", "forward_decode"):
        assert "sinks" not in inspect.signature(getattr(TorchNativeAttnBackend, name)).parameters
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.models.gpt_oss import get_attention_sliding_window_size

    (listed,) = [
        part for part in inspect.getsource(model_hook).split("elif model_arch in ")
        if part.startswith('["GptOssForCausalLM"]')
    ]  # fmt: skip
    names = listed.partition("supported_backends = [")[2].partition("]")[0]
    assert f'"{sinks.BACKEND}"' in names
    assert "torch_native" not in names
    assert get_attention_sliding_window_size(SimpleNamespace(sliding_window=128)) == 127


def test_sinks_keep_the_models_dtype():
    from sglang.srt.models import gpt_oss

    assert 'if attn_backend == "trtllm_mha" else torch.bfloat16' in inspect.getsource(gpt_oss)
    attention, other = torch.nn.Module(), torch.nn.Linear(2, 2)
    attention.qkv_proj = torch.nn.Linear(2, 2)
    attention.sinks = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
    sinks.keep_exact(torch.nn.ModuleList([attention, other]))
    assert attention.sinks.dtype == torch.float32
    assert next(name for name, _ in attention.named_parameters()) == "sinks"


def test_a_cpu_alone_asks_for_it(tmp_path: Path):
    for kind, needs in (("gpt_oss", True), ("qwen3", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert sinks.is_needed(tmp_path) == needs
    assert not sinks.is_needed(tmp_path / "none")
    cpu = arguments_for_device([], cuda=False, has_sinks=True)
    assert cpu[cpu.index("--attention-backend") + 1] == sinks.BACKEND
    assert "--disable-hybrid-swa-memory" in cpu
    assert "--disable-radix-cache" not in cpu
    deterministic = arguments_for_device(
        ["--enable-deterministic-inference"], cuda=False, has_sinks=True
    )
    assert "--disable-radix-cache" in deterministic
    assert arguments_for_device([], cuda=True, has_sinks=True) == arguments_for_device(
        [], cuda=True
    )
