"""Every accepted estimator on shards of the vocabulary, in one world."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.objective import evaluate
from megatron_opd.losses.vocab_parallel import gather_logp
from tests.support.loss_cases import Problem, Row, cache_of, draw_rows, flat, problem

WIDTH = 3
BLOCK = (4, 3)  # smaller than the problem, so that blocks must be joined
FOUND = "value", "hidden gradient", "weight gradient"


def name_of(est: Estimator) -> str:
    """As the rows of docs/estimators.md."""
    return f"{est.objective.type} {est.support.type}"


def outcome(
    est: Estimator,
    case: Problem,
    rows: list[Row],
    head: tuple[torch.Tensor, torch.Tensor],
    lean: bool,
    group: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, gradient of hidden states, gradient of this rank's slice of the head)."""
    hidden_TH, weight_vH = (tensor.clone().requires_grad_() for tensor in head)
    row_N, id_N, _ = flat(rows)
    if lean:
        found = lean_logp(hidden_TH, weight_vH, row_N, id_N, group=group, block=BLOCK)
        student_N = found.logp_N
    else:
        student_N = gather_logp(hidden_TH @ weight_vH.T, row_N, id_N, group=group)
    result = evaluate(est, cache_of(est, case, rows, student_N))
    loss = result.loss_sum / result.count
    gradients = torch.autograd.grad(loss, (hidden_TH, weight_vH), materialize_grads=True)
    return loss.detach(), *gradients


def sweep(out: Path, *, estimators: Sequence[Estimator]) -> None:
    """{estimator: {quantity: largest relative difference to one rank with dense logits}}."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    base = problem(3)
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(len(base.path), WIDTH, dtype=torch.float64, generator=generator)
    weight_VH = torch.randn(base.vocab, WIDTH, dtype=torch.float64, generator=generator)
    case = Problem(**(vars(base) | {"student_TV": hidden_TH @ weight_VH.T}))
    part = slice(rank * base.vocab // size, (rank + 1) * base.vocab // size)
    edge = 1 + hidden_TH.numel()
    names: list[str] = []
    exact: list[torch.Tensor] = []  # loss, hidden gradient, gradient of the whole head
    ours: list[torch.Tensor] = []  # the same of this rank, with its slice of the head
    for number, est in enumerate(estimators):
        rows = draw_rows(est.support, case, np.random.default_rng(number))
        whole = torch.zeros(edge + weight_VH.numel(), dtype=torch.float64)
        if number % size == rank:  # the ranks share the work of the reference
            found = outcome(est, case, rows, (hidden_TH, weight_VH), False, None)
            whole = torch.cat([found[0][None], found[1].flatten(), found[2].flatten()])
        for lean in (False, True):
            head = hidden_TH, weight_VH[part]
            loss, grad_TH, grad_vH = outcome(est, case, rows, head, lean, dist.group.WORLD)
            names.append(name_of(est))
            exact.append(whole)
            ours.append(torch.cat([loss[None] / size, grad_TH.flatten(), grad_vH.flatten()]))
    exact_EX, ours_EX = torch.stack(exact), torch.stack(ours)
    dist.all_reduce(exact_EX)
    width = weight_VH[part].numel()
    own = slice(edge + rank * width, edge + (rank + 1) * width)
    exact_EX = torch.cat([exact_EX[:, :edge], exact_EX[:, own]], dim=1)
    # the hidden gradient is a sum over ranks, which the caller's region makes
    local_EX, summed_EX = ours_EX.clone(), ours_EX[:, :edge].contiguous()
    dist.all_reduce(summed_EX)
    ours_EX[:, :edge] = summed_EX
    errors_E3 = torch.stack(
        [
            _relative(ours_EX[:, at], exact_EX[:, at])
            for at in (slice(0, 1), slice(1, edge), slice(edge, None))
        ],
        dim=1,
    )
    control = _relative(local_EX[:, 1:edge], exact_EX[:, 1:edge]).median()
    dist.all_reduce(errors_E3, dist.ReduceOp.MAX)
    if rank == 0:
        worst: dict[str, dict[str, float]] = {}
        for name, error_3 in zip(names, errors_E3.tolist(), strict=True):
            old = worst.setdefault(name, dict.fromkeys(FOUND, 0.0))
            for quantity, error in zip(FOUND, error_3, strict=True):
                old[quantity] = max(old[quantity], error)
        result = {"errors": worst, "estimators": len(names) // 2, "control": float(control)}
        (out / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _relative(ours_EX: torch.Tensor, exact_EX: torch.Tensor) -> torch.Tensor:
    """Largest difference over the largest exact value; an exact 0 must be met to 1e-12."""
    scale_E = exact_EX.abs().amax(1).clamp(min=1e-3)
    return (ours_EX - exact_EX).abs().amax(1) / scale_E
