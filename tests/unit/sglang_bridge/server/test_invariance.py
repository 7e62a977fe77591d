"""Products that do not see the batch."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.server import invariance

INVARIANT = """
import torch
from sglang_bridge.server import invariance

torch.set_num_threads(1)
invariance.enable()
generator = torch.Generator().manual_seed(0)
with torch.inference_mode():
    for outputs, inputs in ((128, 64), (13, 96), (1, 8), (512, 300)):
        weight = torch.randn(outputs, inputs, generator=generator)
        bias = torch.randn(outputs, generator=generator)
        x = torch.randn(40, inputs, generator=generator)
        exact = x.double() @ weight.double().T
        for rows in (0, 1, 3, 15, 16, 17, 40):
            found = torch.nn.functional.linear(x[:rows], weight)
            assert found.shape == (rows, outputs)
            assert torch.allclose(found.double(), exact[:rows], atol=1e-4)
            with_bias = torch.nn.functional.linear(x[:rows], weight, bias)
            assert torch.allclose(with_bias.double(), exact[:rows] + bias.double(), atol=1e-4)
        scaled = torch.addmm(bias, x, weight.T, beta=0.5, alpha=2.0)
        assert torch.allclose(scaled.double(), 2 * exact + bias.double() / 2, atol=1e-4)
    gate, x = torch.randn(1, 64, generator=generator), torch.randn(40, 64, generator=generator)
    whole = torch.nn.functional.linear(x, gate)
    for first, rows in ((0, 1), (3, 2), (5, 17), (0, 33)):
        some = torch.nn.functional.linear(x[first : first + rows], gate)
        assert torch.equal(some, whole[first : first + rows])
    invariance.check([torch.randn(512, 128), torch.randn(3, 64, 32), torch.randn(7)])
    assert torch.randn(0, 4).mm(torch.randn(4, 2)).shape == (0, 2)
print("invariant")
"""


ACTIVATIONS = """
import torch
from torch.nn import functional as F
from sglang_bridge.server import invariance

torch.set_num_threads(1)
FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "silu": F.silu,
    "silu_": lambda x: F.silu(x.clone(), inplace=True),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus, other": lambda x: F.softplus(x, beta=0.5, threshold=1.0),
}


def differences():
    '''Which functions give rows other bits by themselves, and the largest errors.'''
    generator, seeing, errors = torch.Generator().manual_seed(0), set(), {}
    for columns in (1, 4, 24, 96):
        for dtype in (torch.float32, torch.bfloat16):
            x = (4 * torch.randn(64, columns, generator=generator)).to(dtype)
            for name, function in FUNCTIONS.items():
                whole, exact = function(x), function(x.double())
                assert whole.dtype == dtype
                for first in range(12):
                    for rows in (1, 2, 7, 17, 33):
                        some = function(x[first : first + rows])
                        if not torch.equal(some, whole[first : first + rows]):
                            seeing.add(name)
                error = ((whole.double() - exact) / exact.abs().clamp(min=0.1)).abs().max().item()
                errors[dtype] = max(errors.get(dtype, 0.0), error)
    return seeing, errors


with torch.inference_mode():
    before, torchs = differences()
    invariance.enable()
    after, ours = differences()
    assert {"sigmoid", "silu", "gelu", "softplus"} <= before, before
    assert after == set(), after
    for dtype, limit in {torch.float32: 1e-6, torch.bfloat16: 5e-3}.items():
        assert ours[dtype] <= max(limit, torchs[dtype]), (ours, torchs)  # by processor
    far = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    assert torch.sigmoid(far).tolist() == [0.0, torch.sigmoid(far)[1].item(), 0.5, 1.0, 1.0]
    assert F.silu(far).tolist() == [0.0, F.silu(far)[1].item(), 0.0, 100.0, 1e4]
    assert F.softplus(far).tolist()[2:] == [F.softplus(far)[2].item(), 100.0, 1e4]
    assert torch.isfinite(F.silu(far)).all() and F.softplus(far)[0] == 0
print("invariant")
"""


@pytest.mark.parametrize("program", [INVARIANT, ACTIVATIONS], ids=["products", "activations"])
def test_rows_do_not_see_the_batch(program: str):
    """In a process of its own: the operators of that whole process are replaced."""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.stdout == "invariant\n", found.stderr


@settings(max_examples=5)
@given(limit=st.sampled_from([2, 17, 50, 200]))
def test_products_that_do_are_refused(limit: int):
    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T + (1e-7 if len(x) < limit else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        with pytest.raises(invariance.NotInvariant, match=r"float32 \[8, 4\] depends on the num"):
            invariance.check([torch.ones(8, 4), torch.ones(8, 4)])
        for held in (torch.int8, torch.float8_e4m3fn):  # multiplied in what the first one is
            with pytest.raises(
                invariance.NotInvariant, match=r"float32 \[8, 4\] depends on the num"
            ):
                invariance.check([torch.ones(3), torch.ones(8, 4).to(held)])


def test_a_server_is_told_to_be_deterministic():
    from sglang_bridge.server.spec import ServerSpec, server_command

    for is_so in (False, True):
        spec = ServerSpec(model_path="m", role="student", port=4000, deterministic=is_so)
        assert ("--enable-deterministic-inference" in server_command(spec)) is is_so
