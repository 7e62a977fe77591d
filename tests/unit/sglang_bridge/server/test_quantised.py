"""Quantised layers apart from a server: what kernels get, what experts compute, what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from sglang_bridge.server import plugin
from sglang_bridge.server.entry import offer_standins
from sglang_bridge.server.experts import local_experts_only
from sglang_bridge.server.spec import QUANTIZATION_VARIABLE, ServerSpec, server_command, server_env
from sglang_bridge.weights.formats import Format
from tests.support.quantised import dequantised_oracle, held_oracle

offer_standins()  # SGLang is imported in seconds; test_compat.py does so anyway

FORMATS: tuple[Format, ...] = ("int8", "fp8")


def layer_of(
    format: Format, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """(method, a layer without TP of a server of `dtype`, what it must hold of a checkpoint)."""
    from sglang_bridge.server.quantised import RowScaledLinear

    method, layer, (rows, columns) = RowScaledLinear(format), torch.nn.Module(), (6, 5)

    def weight_loader(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)

    method.create_weights(
        layer, columns, [2, rows - 2], columns, rows, dtype, weight_loader=weight_loader
    )
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    layer.weight.weight_loader(layer.weight, weight)
    return method, layer, held_oracle({"w.weight": weight}, format, dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_multiplies_with_what_it_holds(format: Format):
    method, layer, expected = layer_of(format)
    weight = dequantised_oracle(expected)["w.weight"]
    held = sum(parameter.nbytes for parameter in layer.parameters())
    assert held == weight.numel() + 4 * len(weight)
    x, bias = torch.randn(3, 5), torch.randn(6)
    assert torch.allclose(method.apply(layer, x, bias), linear(x, weight, bias), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_a_checkpoint_is_quantised_as_the_server_would_hold_it(format: Format, dtype: torch.dtype):
    """A float32 checkpoint on a bfloat16 server: cast first, as the sender does."""
    _, layer, expected = layer_of(format, dtype)
    numbers, scales = layer.weight.data, layer.weight_scale.data
    assert torch.equal(numbers.view(torch.uint8), expected["w.weight"].view(torch.uint8))
    assert torch.equal(scales, expected["w.weight_scale"])


@pytest.mark.parametrize("format", FORMATS)
def test_sglangs_kernels_read_live_memory_transposed(format: Format):
    """What is received later must reach them too: nothing may be copied or re-packed."""
    method, layer, _ = layer_of(format)
    seen: list[Any] = []
    method._kernel = SimpleNamespace(apply=lambda layer, x, bias: seen.append((layer, x, bias)))
    method.apply(layer, torch.zeros(1, 5))
    method.process_weights_after_loading(layer)
    ((given, _, _),) = seen
    assert given.weight.shape == (5, 6)
    assert given.weight.stride() == (1, 5), "column-major, as they demand"
    assert given.weight.data_ptr() == layer.weight.data_ptr()
    assert given.weight_scale is layer.weight_scale


@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_computes_its_own_experts_alone(format: Format):
    """Of three tokens' experts, -1 is another rank's."""
    from sglang_bridge.server.quantised import _Dequantising

    generator = torch.Generator().manual_seed(2)
    shapes = {"w13": (2, 8, 3), "w2": (2, 3, 4)}
    exact = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    weights, shown = {}, {}
    for key, stack in exact.items():
        held = [held_oracle({"w.weight": matrix}, format) for matrix in stack]
        weights[key] = [dequantised_oracle(each)["w.weight"] for each in held]
        numbers = torch.stack([each["w.weight"].view(torch.uint8) for each in held])
        scales = torch.stack([each["w.weight_scale"] for each in held])
        numbers = numbers.view(held[0]["w.weight"].dtype)
        shown[key] = _Dequantising(numbers, scales, torch.float32)
    layer = SimpleNamespace(w13_weight=shown["w13"], w2_weight=shown["w2"])
    x, shares = torch.randn(3, 3), torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.3, 0.7]])
    experts = torch.tensor([[0, 1], [-1, 0], [-1, -1]])

    def never(*_: object) -> torch.Tensor:
        raise AssertionError("not SGLang's own: it knows no other ranks")

    found = local_experts_only(never, layer, x, (shares, experts, None), SimpleNamespace())
    expected = torch.zeros(3, 3)
    for token in range(3):
        for expert, share in zip(experts[token].tolist(), shares[token], strict=True):
            if expert >= 0:
                gate, up = linear(x[token], weights["w13"][expert]).chunk(2)
                expected[token] += share * linear(silu(gate) * up, weights["w2"][expert])
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("model.layers.0.self_attn.qkv_proj", "RowScaledLinear"),
        ("model.layers.0.mlp.gate_up_proj", "RowScaledLinear"),
        ("model.layers.0.mlp.gate", "UnquantizedLinearMethod"),
        ("lm_head", "UnquantizedLinearMethod"),
    ],
)
def test_routers_and_heads_are_held_as_they_are(prefix: str, kind: str):
    from sglang.srt.layers.linear import LinearBase

    from sglang_bridge.server.quantised import RowScaledConfig

    layer = LinearBase.__new__(LinearBase)
    assert type(RowScaledConfig("int8").get_quant_method(layer, prefix)).__name__ == kind
    assert RowScaledConfig("int8").get_quant_method(torch.nn.Module(), prefix) is None


def test_only_servers_that_are_told_to_quantise(monkeypatch: pytest.MonkeyPatch):
    spec = ServerSpec(model_path="m", role="student", port=1, quantization="fp8")
    assert server_env(spec, {})[QUANTIZATION_VARIABLE] == "fp8"
    plain = ServerSpec(model_path="m", role="teacher", port=1)
    assert "--moe-runner-backend" not in server_command(plain)
    inherited = {QUANTIZATION_VARIABLE: "int8"}
    assert QUANTIZATION_VARIABLE not in server_env(plain, inherited)
    monkeypatch.delenv(QUANTIZATION_VARIABLE, raising=False)
    assert plugin.around_quant_config(lambda: "theirs") == "theirs"
    monkeypatch.setenv(QUANTIZATION_VARIABLE, "fp8")
    assert plugin.around_quant_config(lambda: None).get_name() == "w8a8_fp8"
    with pytest.raises(ValueError, match="must be unset: SGLang quantises itself, got 'fp8'"):
        plugin.around_quant_config(lambda: "theirs")
    monkeypatch.setenv(QUANTIZATION_VARIABLE, "int4")
    with pytest.raises(ValueError, match="must be one of int8, fp8, got 'int4'"):
        plugin.around_quant_config(lambda: None)
