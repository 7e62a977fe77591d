"""Experts on a CPU: gpt-oss's, of all ranks and of one's own, against transformers'."""

from types import SimpleNamespace

import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from sglang_bridge.server.experts import local_experts_only

EXPERTS, HIDDEN, FFN, LIMIT = 4, 6, 5, 0.7


def never(*_: object) -> torch.Tensor:
    raise AssertionError("not SGLang's own, which is compiled")


def test_clamped_gates_and_biases():
    torch.manual_seed(1)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, swiglu_limit=LIMIT
    )
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config).double()
    for parameter in theirs.parameters():
        parameter.data.normal_()
    x, shares = torch.randn(7, HIDDEN).double(), torch.rand(7, 2).double()
    experts = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(7)])
    expected = theirs(x, experts, shares).detach()
    gates = SimpleNamespace(gemm1_alpha=1.702, gemm1_clamp_limit=LIMIT)
    held = {
        "w13_weight": theirs.gate_up_proj.mT,
        "w13_weight_bias": theirs.gate_up_proj_bias,
        "w2_weight": theirs.down_proj.mT,
        "w2_weight_bias": theirs.down_proj_bias,
    }
    found = local_experts_only(never, SimpleNamespace(**held), x, (shares, experts, None), gates)
    assert torch.allclose(found, expected, atol=1e-12)
    summed = torch.zeros_like(found)
    for half in (slice(0, 2), slice(2, 4)):  # each rank's own, the others as -1
        layer = SimpleNamespace(**{name: tensor[half] for name, tensor in held.items()})
        local = experts - half.start
        local = torch.where((local >= 0) & (local < 2), local, -1)
        summed += local_experts_only(never, layer, x, (shares, local, None), gates)
    assert torch.allclose(summed, expected, atol=1e-12)
