"""Gradient norms as Megatron's clipping computes them on the ranks of a CPU world."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

from megatron_opd.learner.devices import cpu


def cases(rank: int) -> dict[str, list[torch.Tensor]]:
    """A rank's gradients by case, the same ones at every call."""
    generator = torch.Generator().manual_seed(7 + rank)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    return {
        "one big": [normal(10_000_000)],
        "many small": [normal(size) for size in range(1, 2000)],
        "mixed scales": [normal(3, 5000, scale=10.0**power) for power in range(-6, 3)],
        "a view": [normal(300, 70).t()],
        "on rank 0 alone": [normal(5000)] if rank == 0 else [],
        "an empty tensor": [normal(0), normal(4096)],
        "none": [],
        "inf": [normal(9000), torch.tensor([torch.inf])] if rank == 0 else [normal(9000)],
        "nan": [torch.full((5000,), torch.nan)] if rank == 0 else [normal(9000)],
    }


def norms(out: Path) -> None:
    """{case: [norm through get_grad_norm_fp32, float64 norm of all ranks' gradients]}."""
    with cpu.install():
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        found, ranks = {}, [cases(other) for other in range(size)]
        for name, mine in ranks[rank].items():
            everything = [grad for other in ranks for grad in other[name]]
            exact = sum(float(grad.double().square().sum()) for grad in everything) ** 0.5
            found[name] = (clip_grads.get_grad_norm_fp32(mine), exact)
        if rank == 0:
            (out / "result.json").write_text(json.dumps(found))
        dist.destroy_process_group()
