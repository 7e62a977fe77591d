"""The device code of the draw cache and of the loss gives on CUDA what it gives on a CPU."""

import pytest
import torch

from megatron_opd.losses.vocab_parallel import gather_logp
from sglang_bridge.server.dedup import UNUSED, dedup
from sglang_bridge.server.sampling import behaviour, draw

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
    ids = draw(on_cuda.probs_BV, uniform.cuda())
    # float32 softmax differs by rounding, which moves a draw only at the edge of an id's interval
    assert (ids.cpu() == draw(on_cpu.probs_BV, uniform)).float().mean() > 0.99
    assert (on_cuda.probs_BV.gather(1, ids) > 0).all()
    torch.testing.assert_close(
        on_cuda.gather(ids).cpu(), on_cpu.gather(ids.cpu()), atol=1e-5, rtol=0
    )


def test_deduplicated_rows():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 40, (B, M), generator=generator)
    num_draws = torch.randint(1, M + 1, (B,), generator=generator)
    path = torch.randint(0, 40, (B,), generator=generator)
    on_cpu = dedup(ids, num_draws, path)
    on_cuda = dedup(ids.cuda(), num_draws.cuda(), path.cuda())
    for name in ("ids_BR", "count_BR", "path_B", "length_B"):
        assert torch.equal(getattr(on_cuda, name).cpu(), getattr(on_cpu, name)), name
    assert (on_cpu.ids_BR < UNUSED).any()


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
