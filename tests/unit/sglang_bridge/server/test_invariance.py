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
    invariance.check([torch.randn(512, 128), torch.randn(3, 64, 32), torch.randn(7)])
    assert torch.randn(0, 4).mm(torch.randn(4, 2)).shape == (0, 2)
print("invariant")
"""


def test_products_do_not_see_the_batch():
    """In a process of its own: the products of that whole process are replaced."""
    found = subprocess.run(
        [sys.executable, "-c", INVARIANT], capture_output=True, text=True, check=False, timeout=120
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
