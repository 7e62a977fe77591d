"""Counted FLOPs against torch's counter on transformers' models, forward and backward."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing.flops import Work, forward_flops, mfu, train_flops
from tests.support.delta_models import tiny_qwen3_5
from tests.support.figures import bounded, relative
from tests.support.latent_models import tiny_deepseek_v2, tiny_deepseek_v3
from tests.support.models import (
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mixtral,
    tiny_olmo3,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tests.support.published import MODELS as PUBLISHED

PROMPT, RESPONSE = 23, 41
INPUTS = PROMPT + RESPONSE - 1
MIXED = {"num_hidden_layers": 3, "mlp_only_layers": [1], "intermediate_size": 96}
MODELS: dict[str, tuple[Callable[..., Path], dict[str, object]]] = {
    "qwen3": (tiny_qwen3, {"head_dim": 32}),
    "qwen3, tied": (tiny_qwen3, {"tie_word_embeddings": True}),
    "qwen3-moe": (tiny_qwen3_moe, {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3-moe, a dense layer": (tiny_qwen3_moe, MIXED),
    "mixtral": (tiny_mixtral, {}),
    "qwen2-moe": (tiny_qwen2_moe, MIXED),
    "llama": (tiny_llama, {}),
    "olmo3": (tiny_olmo3, {}),
    "gemma3": (tiny_gemma3, {}),
    "gpt-oss": (tiny_gpt_oss, {}),
    "deepseek v2": (tiny_deepseek_v2, {"first_k_dense_replace": 3}),
    "deepseek v3": (tiny_deepseek_v3, {"first_k_dense_replace": 3}),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_what_torch_counts(name: str, tmp_path: Path):
    make, fields = MODELS[name]
    path = make(tmp_path / "model", **fields)
    # eager: fused kernels of experts and attention are not seen by the counter
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    ids_1s = torch.randint(512, (1, INPUTS), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as forward:
        out = model(ids_1s, logits_to_keep=RESPONSE)
    with FlopCounterMode(display=False) as backward:
        out.logits.sum().backward()
    spec = read_model_spec(path)
    # eager attention computes the masked pairs too
    work = Work(INPUTS, INPUTS**2, RESPONSE, INPUTS**2)
    ours, both = forward_flops(spec, work), train_flops(spec, work)
    counted = forward.get_total_flops()
    bounded("FLOPs, forward, against torch's counter", relative(ours, counted), 1e-4, name)
    counted += backward.get_total_flops()
    bounded("FLOPs, both passes, against torch's counter", relative(both, counted), 1e-4, name)


@pytest.mark.parametrize("name", ["Qwen3-1.7B", "Qwen3-30B-A3B"])
def test_published_models_have_exactly_the_products_of_their_traced_graph(name: str):
    """Both passes at their real size, on the meta device."""
    config = AutoConfig.from_pretrained(PUBLISHED / name)
    # as eager, experts as products that need no value of the routing
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
        ids_1s = torch.zeros(1, INPUTS, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(ids_1s, logits_to_keep=RESPONSE).logits.sum().backward()
    spec = read_model_spec(PUBLISHED / name)
    expected = train_flops(spec, Work(INPUTS, INPUTS**2, RESPONSE))
    assert counter.get_total_flops() == expected


def test_a_delta_net_has_a_state_instead_of_pairs(tmp_path: Path):
    """Step by step: k S, the outer product, q S; the other products are those of its matrices."""
    path = tiny_qwen3_5(tmp_path / "model", num_hidden_layers=4)
    spec, work = read_model_spec(path), Work.of([(PROMPT, RESPONSE)])
    model = AutoModelForCausalLM.from_pretrained(path)
    matrices = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n and p.ndim > 1)
    rule = 2 * work.positions * 2 * 3 * 4 * 8 * 16
    pairs = 2 * 2 * 4 * (32 + 32) * work.pairs
    head = 2 * 64 * 512 * work.scored
    assert forward_flops(spec, work) == 2 * work.positions * matrices + rule + pairs + head


def test_work_of_samples():
    work = Work.of([(3, 2), (1, 1)])
    assert work == Work(positions=5, pairs=4 * 5 // 2 + 1, scored=3, windowed_pairs=11)
    assert Work.of([(3, 2), (1, 1)], 2) == replace(work, windowed_pairs=1 + 2 + 2 + 2 + 1)


def test_six_times_the_active_parameters_for_short_samples(tmp_path: Path):
    """The rule of thumb 6 N, with the head, where attention hardly counts."""
    path = tiny_qwen3(tmp_path / "model", hidden_size=256, intermediate_size=1024)
    spec = read_model_spec(path)
    matrices = sum(
        p.numel()
        for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()
        if p.ndim == 2 and "embed" not in name
    )
    work = Work.of([(1, 8)] * 10)
    assert train_flops(spec, work) == pytest.approx(6 * matrices * work.positions, rel=0.01)


def test_utilisation():
    assert mfu(1e15, 2.0, 4, 250.0) == pytest.approx(0.5)
    assert mfu(1e15, 2.0, 4, None) is None
