from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP

from megatron_opd.learner.gated import (
    Activation,
    GatedMLP,
    gelu,
    is_plain_swiglu,
    keep_less,
    swiglu,
)

PLAIN = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "add_bias_linear": False,
    "bias_activation_fusion": False,
    "use_te_activation_func": False,
}


def of_megatron(both: torch.Tensor, activation: Activation = F.silu) -> torch.Tensor:
    """What MLP.forward of Megatron-Core 0.19.2 computes without bias and clamp."""
    gate, up = torch.chunk(both, 2, dim=-1)
    return activation(gate) * (up + 0.0)


def drawn(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (4 * torch.randn(7, 2, 48, generator=generator)).to(dtype).requires_grad_()


@pytest.mark.parametrize("activation", [F.silu, gelu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients_are_megatrons_bit_for_bit(dtype: torch.dtype, activation: Activation):
    both, same = drawn(dtype), drawn(dtype)
    out, expected = swiglu(both, activation), of_megatron(same, activation)
    assert torch.equal(out, expected)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    out.backward(upstream)
    expected.backward(upstream)
    assert both.grad is not None
    assert same.grad is not None
    assert torch.equal(both.grad, same.grad)


@pytest.mark.parametrize("activation", [F.silu, gelu])
def test_gradients_are_those_of_finite_differences(activation: Activation):
    assert torch.autograd.gradcheck(lambda x: swiglu(x, activation), drawn(torch.float64))


def kept(function: Any) -> int:
    """Bytes of tensors that are kept for the backward pass, each storage once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    both = drawn(torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(both)
    assert out.requires_grad
    return sum(storage.nbytes() for storage in storages.values()) // both.element_size()


def test_the_input_alone_is_kept():
    assert kept(swiglu) == 7 * 2 * 48
    assert kept(of_megatron) == 7 * 2 * (48 + 24 + 24)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gated_linear_unit", False),
        ("activation_func", F.gelu),
        ("activation_func_clamp_value", 7.0),
        ("glu_linear_offset", 1.0),
        ("add_bias_linear", True),
        ("bias_activation_fusion", True),
        ("use_te_activation_func", True),
    ],
)
def test_any_other_block_is_left_to_megatron(name: str, value: Any):
    plain: Any = SimpleNamespace(**PLAIN)
    other: Any = SimpleNamespace(**PLAIN | {name: value})
    assert is_plain_swiglu(plain)
    assert not is_plain_swiglu(other)


def test_blocks_of_a_model_are_turned_wherever_they_are():
    class Own(MLP):
        pass

    def made(kind: type[MLP]) -> MLP:
        block = kind.__new__(kind)
        torch.nn.Module.__init__(block)
        return block

    model = torch.nn.ModuleList([torch.nn.Sequential(made(MLP)), made(Own), torch.nn.Linear(1, 1)])
    keep_less(model)
    inner: Any = model[0]
    assert type(inner[0]) is GatedMLP
    assert type(model[1]) is Own
    assert type(model[2]) is torch.nn.Linear
