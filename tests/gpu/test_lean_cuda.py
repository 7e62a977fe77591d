"""The blockwise log-probs give on CUDA, in every type, what float64 gives on a CPU."""

import pytest
import torch

from megatron_opd.losses.lean import lean_logp
from tests.support.figures import bounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
T, V, H, N = 300, 5000, 64, 2000
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2}


def outcome(
    hidden_TH: torch.Tensor, weight_vH: torch.Tensor, main_grad: bool, device: str
) -> dict[str, torch.Tensor]:
    """Results and gradients in float64 on the CPU."""
    generator = torch.Generator().manual_seed(1)
    row_N = torch.randint(T, (N,), generator=generator)
    id_N = torch.randint(V, (N,), generator=generator)
    grads = torch.randn(N + 2 * T, dtype=torch.float64, generator=generator)
    hidden_TH = hidden_TH.to(device).requires_grad_()
    weight = torch.nn.Parameter(weight_vH.to(device))
    if main_grad:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    options = {"temperature": 0.7, "block": (128, 512)}
    found = lean_logp(hidden_TH, weight, row_N.to(device), id_N.to(device), **options)
    flat = torch.cat([found.logp_N, found.log_normaliser_T, found.entropy_T])
    flat.backward(grads.to(flat))
    gradient = weight.main_grad if main_grad else weight.grad  # type: ignore[attr-defined]
    values = {"value": flat, "grad_hidden": hidden_TH.grad, "grad_weight": gradient}
    return {name: v.detach().double().cpu() for name, v in values.items() if v is not None}


@pytest.mark.parametrize("main_grad", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_equals_float64_on_the_cpu(dtype: torch.dtype, main_grad: bool):
    generator = torch.Generator().manual_seed(0)
    hidden_TH = (2 * torch.randn(T, H, generator=generator)).to(dtype)
    weight_vH = (torch.randn(V, H, generator=generator) / 4).to(dtype)
    ours = outcome(hidden_TH, weight_vH, main_grad, "cuda")
    exact = outcome(hidden_TH.double(), weight_vH.double(), False, "cpu")
    limit = LIMITS[torch.float32 if main_grad and dtype == torch.float64 else dtype]
    for name, expected in exact.items():
        error = (ours[name] - expected).abs().max() / expected.abs().max()
        kind = f"lean on CUDA, {dtype}, main_grad {main_grad}"
        bounded(f"{kind}: {name}", float(error), limit)


def test_nothing_of_the_size_of_the_logits_is_held():
    rows, ids, width = 4096, 100_000, 64
    hidden_TH = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(ids, width, device="cuda", dtype=torch.bfloat16))
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    row_N = torch.arange(rows, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lean_logp(hidden_TH, weight, row_N, row_N, block=(4096, 1024)).logp_N.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    bounded("lean on CUDA: extra bytes / bytes of float32 logits", extra / (4 * rows * ids), 0.05)
