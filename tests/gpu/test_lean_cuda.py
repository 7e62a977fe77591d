"""The lean log-probs give on CUDA, in every type and both ways, what float64 gives on a CPU."""

import pytest
import torch

from megatron_opd.losses.fused import can_fuse
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.passes import HeadSlice
from tests.support.figures import bounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
T, V, H, N = 300, 5000, 64, 2000
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BLOCKS = {"kernels": None, "blocks": (128, 512)}
"""None: kernels, but for float64."""


def outcome(
    hidden_TH: torch.Tensor,
    weight_vH: torch.Tensor,
    main_grad: bool,
    device: str,
    block: tuple[int, int] | None = None,
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
    ids = row_N.to(device), id_N.to(device)
    found = lean_logp(hidden_TH, HeadSlice(weight), *ids, temperature=0.7, block=block)
    flat = torch.cat([found.logp_N, found.log_normaliser_T, found.entropy_T])
    flat.backward(grads.to(flat))
    gradient = weight.main_grad if main_grad else weight.grad  # type: ignore[attr-defined]
    values = {"value": flat, "grad_hidden": hidden_TH.grad, "grad_weight": gradient}
    return {name: v.detach().double().cpu() for name, v in values.items() if v is not None}


@pytest.mark.parametrize("way", BLOCKS)
@pytest.mark.parametrize("main_grad", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_equals_float64_on_the_cpu(dtype: torch.dtype, main_grad: bool, way: str):
    generator = torch.Generator().manual_seed(0)
    hidden_TH = (2 * torch.randn(T, H, generator=generator)).to(dtype)
    weight_vH = (torch.randn(V, H, generator=generator) / 4).to(dtype)
    ours = outcome(hidden_TH, weight_vH, main_grad, "cuda", BLOCKS[way])
    exact = outcome(hidden_TH.double(), weight_vH.double(), False, "cpu")
    limit = LIMITS[torch.float32 if main_grad and dtype == torch.float64 else dtype]
    for name, expected in exact.items():
        error = (ours[name] - expected).abs().max() / expected.abs().max()
        kind = f"lean on CUDA by {way}, {dtype}, main_grad {main_grad}"
        bounded(f"{kind}: {name}", float(error), limit)


@pytest.mark.parametrize(("block", "share"), [((4096, 1024), 0.05), (None, 0.25)])
def test_nothing_of_the_size_of_the_logits_is_held(block: tuple[int, int] | None, share: float):
    """The kernels' gradient takes up to 256 MiB, whatever the size."""
    rows, ids, width = 4096, 100_000, 64
    hidden_TH = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(ids, width, device="cuda", dtype=torch.bfloat16))
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    row_N = torch.arange(rows, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lean_logp(hidden_TH, HeadSlice(weight), row_N, row_N, block=block).logp_N.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    way = "kernels" if block is None else "blocks"
    name = f"lean on CUDA by {way}: extra bytes / bytes of float32 logits"
    bounded(name, extra / (4 * rows * ids), share)


def test_kernels_are_what_a_gpu_uses():
    hidden_TH = torch.zeros(4, 8, device="cuda", dtype=torch.bfloat16)
    assert can_fuse(hidden_TH, hidden_TH)
    assert not can_fuse(hidden_TH.double(), hidden_TH.double())
    assert not can_fuse(hidden_TH.T, hidden_TH)
