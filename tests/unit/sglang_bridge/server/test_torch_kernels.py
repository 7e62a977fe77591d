"""What CPU servers compute in torch, by the formula; SGLang's own kernels still fail there."""

import pkgutil

import pytest
import torch

from sglang_bridge.server import torch_kernels
from sglang_bridge.server.compat import hooks
from sglang_bridge.server.entry import offer_standins

offer_standins()


def test_shared_experts_are_added_by_their_gate():
    generator = torch.Generator().manual_seed(0)
    x, shared, out = (torch.randn(5, 8, generator=generator) for _ in range(3))
    gate, before = torch.randn(8, generator=generator), out.clone()
    torch_kernels.add_gated(x, gate, shared, out)
    for token in range(5):
        weight = 1 / (1 + torch.exp(-(x[token].double() @ gate.double())))
        expected = before[token].double() + weight * shared[token].double()
        torch.testing.assert_close(out[token].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on a GPU")
def test_sglangs_own_gate_still_fails_on_a_cpu():
    """Else the replacement may go."""
    x_TH, gate_H = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(RuntimeError, match="active drivers"):
        pkgutil.resolve_name(hooks.SHARED_GATE)(x_TH, gate_H, x_TH.clone(), x_TH.clone())
