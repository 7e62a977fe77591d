"""The device code of the draw cache and of the loss gives on CUDA what it gives on a CPU."""

import numpy as np
import pytest
import torch

from megatron_opd.losses.vocab_parallel import gather_logp
from sglang_bridge.server.inversion import draw
from sglang_bridge.server.masses import can_use_kernels, masses_of
from sglang_bridge.server.rows import build_rows, forced
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.selection import UNUSED, Wanted, select
from tests.support.figures import bounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
B, V, M = 8, 151_936, 64


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_draws_and_their_log_probs(logits: torch.Tensor, top_p: float | None):
    uniform = torch.rand(B, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    temperature = torch.full((B, 1), 0.7)
    cut = None if top_p is None else torch.full((B,), top_p)
    on_cpu = behaviour(logits, temperature, top_p_B=cut)
    on_cuda = behaviour(
        logits.cuda(), temperature.cuda(), top_p_B=None if cut is None else cut.cuda()
    )
    expected, found = masses_of(on_cpu), masses_of(on_cuda)
    ids = draw(on_cuda, found, uniform.cuda())
    # rounding moves a draw only at the edge of an id's interval
    assert (ids.cpu() == draw(on_cpu, expected, uniform)).float().mean() > 0.99
    logp = found.norm.logp(on_cuda.logits_BV.gather(1, ids)).cpu()
    assert logp.isfinite().all()
    theirs = expected.norm.logp(on_cpu.logits_BV.gather(1, ids.cpu()))
    torch.testing.assert_close(logp, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocab", [V, V + 77, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masses_by_kernel(logits: torch.Tensor, dtype: torch.dtype, vocab: int):
    """Against float64, in a batch and alone."""
    whole = torch.cat([logits, logits[:, :77]], dim=1)[:, :vocab].to(dtype).contiguous()
    temperature = torch.linspace(0.5, 1.5, B)[:, None]
    policy = behaviour(whole.cuda(), temperature.cuda())
    assert can_use_kernels(policy.logits_BV)
    found = masses_of(policy)
    exact = (whole.double() / temperature.double()).log_softmax(-1)
    worst = (found.norm.logp(policy.logits_BV).cpu() - exact).abs().max()
    bounded("masses on CUDA: log-probs against float64 (nats)", float(worst), 2e-5)
    alone = masses_of(behaviour(whole[3:4].cuda(), temperature[3:4].cuda()))
    assert torch.equal(alone.mass_Bk, found.mass_Bk[3:4]), "a row must not see its neighbours"


def test_a_number_has_the_id_whose_interval_holds_it(logits: torch.Tensor):
    numbers = torch.rand(B, 4000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    policy = behaviour(logits.cuda(), torch.ones(1, 1).cuda())
    ids = draw(policy, masses_of(policy), numbers.cuda()).cpu()
    probs = logits.double().softmax(-1)
    above = probs.cumsum(-1).gather(1, ids)
    outside = torch.maximum(above - probs.gather(1, ids) - numbers, numbers - above)
    bounded("draws on CUDA: a number from its id's interval", float(outside.max()), 1e-6)


def test_nothing_of_the_size_of_the_logits_is_held():
    logits_BV = torch.randn(64, V, device="cuda")
    wanted = Wanted(np.full(64, 0), np.full(64, 4))
    uniform_BM = torch.rand(64, 4, dtype=torch.float64, device="cuda")
    policy = behaviour(logits_BV, torch.ones(64, 1, device="cuda"))
    select(policy, wanted, uniform_BM)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    select(policy, wanted, uniform_BM)
    extra = torch.cuda.max_memory_allocated() - before
    bounded("draws on CUDA: extra bytes / bytes of logits", extra / (4 * logits_BV.numel()), 0.1)


def test_selected_rows(logits: torch.Tensor):
    generator = torch.Generator().manual_seed(2)
    wanted = Wanted(np.array([0, 16, 64, 0, 16, 1, 0, 3]), np.array([64, 48, 0, 0, 1, 7, 1, 64]))
    uniform = torch.rand(B, wanted.max_draws, dtype=torch.float64, generator=generator)
    path = torch.randint(0, V, (B, 1), generator=generator)
    one = torch.ones(B, 1)
    chosen = forced(path, torch.zeros(B, 1))
    on_cpu = build_rows(select(behaviour(logits, one), wanted, uniform), chosen)
    device_logits = logits.cuda()
    policy = behaviour(device_logits, one.cuda())
    chosen = forced(path.cuda(), torch.zeros(B, 1).cuda())
    on_cuda = build_rows(select(policy, wanted, uniform.cuda()), chosen)
    assert torch.equal(device_logits.cpu(), logits), "the sampler still needs these logits"
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
        leaf = logits.to(device, copy=True).requires_grad_()
        logp = gather_logp(leaf, rows.to(device), ids.to(device), temperature=0.7)
        (logp * weight.to(device)).sum().backward()
        assert leaf.grad is not None
        grads.append((logp.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(grads[0][0], grads[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(grads[0][1], grads[1][1], atol=1e-6, rtol=1e-5)
