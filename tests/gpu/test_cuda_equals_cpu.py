"""The device code of the draw cache and of the loss gives on CUDA what it gives on a CPU."""

import numpy as np
import pytest
import torch

from megatron_opd.losses.vocab_parallel import gather_logp
from sglang_bridge.server.rows import build_rows
from sglang_bridge.server.sampling import behaviour, draw
from sglang_bridge.server.selection import UNUSED, Wanted, select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
B, V, M = 8, 151_936, 64


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(0))


def test_draws_and_their_log_probs(logits: torch.Tensor):
    uniform = torch.rand(B, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    temperature = torch.full((B, 1), 0.7)
    top_p = torch.full((B,), 0.9)
    on_cpu = behaviour(logits, temperature, top_p_B=top_p)
    on_cuda = behaviour(logits.cuda(), temperature.cuda(), top_p_B=top_p.cuda())
    ids, _ = draw(on_cuda.probs_BV, uniform.cuda())
    # float32 softmax differs by rounding, which moves a draw only at the edge of an id's interval
    assert (ids.cpu() == draw(on_cpu.probs_BV, uniform)[0]).float().mean() > 0.99
    assert (on_cuda.probs_BV.gather(1, ids) > 0).all()
    torch.testing.assert_close(
        on_cuda.gather(ids).cpu(), on_cpu.gather(ids.cpu()), atol=1e-5, rtol=0
    )


def test_selected_rows(logits: torch.Tensor):
    generator = torch.Generator().manual_seed(2)
    wanted = Wanted(np.array([0, 16, 64, 0, 16, 1, 0, 3]), np.array([64, 48, 0, 0, 1, 7, 1, 64]))
    uniform = torch.rand(B, wanted.max_draws, dtype=torch.float64, generator=generator)
    path = torch.randint(0, V, (B, 1), generator=generator)
    one = torch.ones(B, 1)
    on_cpu = build_rows(select(behaviour(logits, one), wanted, uniform), path)
    policy = behaviour(logits.cuda(), one.cuda())
    on_cuda = build_rows(select(policy, wanted, uniform.cuda()), path.cuda())
    # rounding moves a draw only at the edge of an id's interval
    assert (on_cuda.ids_BR.cpu() == on_cpu.ids_BR).float().mean() > 0.99
    exact = wanted.draws_B == 0
    torch.testing.assert_close(
        on_cuda.weight_BR.cpu()[exact], on_cpu.weight_BR[exact], atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(
        on_cuda.weight_BR.sum(1).cpu(), on_cpu.weight_BR.sum(1), atol=1e-6, rtol=1e-5
    )
    assert (on_cpu.ids_BR == UNUSED).any()


def test_log_probs_of_ragged_ids_and_their_gradient(logits: torch.Tensor):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, B, (500,), generator=generator).sort().values
    ids = torch.randint(0, V, (500,), generator=generator)
    weight = torch.randn(500, generator=generator)
    grads = []
    for device in ("cpu", "cuda"):
        leaf = logits.to(device).requires_grad_()
        logp = gather_logp(leaf, rows.to(device), ids.to(device), temperature=0.7)
        (logp * weight.to(device)).sum().backward()
        assert leaf.grad is not None
        grads.append((logp.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(grads[0][0], grads[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(grads[0][1], grads[1][1], atol=1e-6, rtol=1e-5)
