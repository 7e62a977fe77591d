"""Every accepted estimator on shards of the vocabulary, in one world."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.objective import evaluate
from megatron_opd.losses.passes import HeadSlice
from megatron_opd.losses.vocab_parallel import gather_logp
from tests.support.loss_cases import Problem, Row, cache_of, draw_rows, flat, problem

WIDTH = 3
BLOCK = (4, 3)  # smaller than the problem, so that blocks must be joined
FOUND = "value", "hidden gradient", "weight gradient"


def name_of(est: Estimator) -> str:
    """As the rows of docs/estimators.md."""
    return f"{est.objective.type} {est.support.type}"


@dataclass(frozen=True)
class Head:
    """A head, or one rank's slice of it: rows [v, H], of which the first `num_ids` are ids."""

    weight_vH: torch.Tensor
    num_ids: int

    @staticmethod
    def of(weight_VH: torch.Tensor, per_rank: int, rank: int) -> Head:
        """The slice of a rank; what pads the vocabulary has weights like any other."""
        real_vH = weight_VH[rank * per_rank : (rank + 1) * per_rank]
        padding_vH = torch.full((per_rank - len(real_vH), WIDTH), 7.0, dtype=torch.float64)
        return Head(torch.cat([real_vH, padding_vH]), len(real_vH))


def outcome(
    est: Estimator,
    case: Problem,
    rows: list[Row],
    hidden_TH: torch.Tensor,
    head: Head,
    lean: bool,
    group: Any,
) -> torch.Tensor:
    """Loss, gradient of hidden states, gradient of this rank's slice of the head, flat."""
    inputs = hidden_TH.clone().requires_grad_(), head.weight_vH.clone().requires_grad_()
    row_N, id_N, _ = flat(rows)
    if lean:
        piece = HeadSlice(inputs[1], group, case.vocab)
        student_N = lean_logp(inputs[0], piece, row_N, id_N, block=BLOCK).logp_N
    else:
        padding_v = torch.arange(len(head.weight_vH)) >= head.num_ids  # as PaddedHead does
        logits_Tv = (inputs[0] @ inputs[1].T).masked_fill(padding_v, -torch.inf)
        student_N = gather_logp(logits_Tv, row_N, id_N, group=group)
    result = evaluate(est, cache_of(est, case, rows, student_N))
    loss = result.loss_sum / result.count
    gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return torch.cat([loss.detach()[None], *(gradient.flatten() for gradient in gradients)])


def sweep(out: Path, *, estimators: Sequence[Estimator]) -> None:
    """{estimator: {quantity: largest relative difference to one rank with dense logits}}.

    Each in halves; one of each name also with all ids at the first rank, so that the other one's
    slice is padding.
    """
    dist.init_process_group("gloo")
    vocab, named = problem(3).vocab, {name_of(est): est for est in estimators}
    worst = {name: dict.fromkeys(FOUND, 0.0) for name in named}
    control = _split(estimators, vocab // dist.get_world_size(), worst)
    _split(tuple(named.values()), vocab, worst)
    if dist.get_rank() == 0:
        told = {"errors": worst, "estimators": len(estimators), "control": control}
        (out / "result.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _split(
    estimators: Sequence[Estimator], per_rank: int, worst: dict[str, dict[str, float]]
) -> float:
    """Add the errors of ranks that hold so many rows each; see _errors for what is returned."""
    rank, size = dist.get_rank(), dist.get_world_size()
    base = problem(3)
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(len(base.path), WIDTH, dtype=torch.float64, generator=generator)
    weight_VH = torch.randn(base.vocab, WIDTH, dtype=torch.float64, generator=generator)
    case = Problem(**(vars(base) | {"student_TV": hidden_TH @ weight_VH.T}))
    whole, own = Head(weight_VH, base.vocab), Head.of(weight_VH, per_rank, rank)
    edge = 1 + hidden_TH.numel()
    names: list[str] = []
    exact: list[torch.Tensor] = []
    ours: list[torch.Tensor] = []
    for number, est in enumerate(estimators):
        rows = draw_rows(est.support, case, np.random.default_rng(number))
        expected = torch.zeros(edge + weight_VH.numel(), dtype=torch.float64)
        if number % size == rank:  # the ranks share the work of the reference
            expected = outcome(est, case, rows, hidden_TH, whole, False, None)
        for lean in (False, True):
            names.append(name_of(est))
            exact.append(expected)
            ours.append(outcome(est, case, rows, hidden_TH, own, lean, dist.group.WORLD))
    exact_EX, ours_EX = torch.stack(exact), torch.stack(ours)
    dist.all_reduce(exact_EX)
    missing = exact_EX.new_zeros(len(exact), (size * per_rank - base.vocab) * WIDTH)
    parts = torch.cat([exact_EX[:, edge:], missing], dim=1).chunk(size, dim=1)
    exact_EX = torch.cat([exact_EX[:, :edge], parts[rank]], dim=1)
    errors_E3, control = _errors(ours_EX, exact_EX, edge)
    for name, error_3 in zip(names, errors_E3.tolist(), strict=True):
        for quantity, error in zip(FOUND, error_3, strict=True):
            worst[name][quantity] = max(worst[name][quantity], error)
    return control


def _errors(ours_EX: torch.Tensor, exact_EX: torch.Tensor, edge: int) -> tuple[torch.Tensor, float]:
    """Errors of each quantity over all ranks, and of this rank's own part of the gradient.

    The gradient of the hidden states is a sum over ranks, which the caller's region makes; all have
    the loss.
    """
    summed_EX = ours_EX[:, :edge].clone()
    summed_EX[:, 0] /= dist.get_world_size()
    dist.all_reduce(summed_EX)
    whole_EX = torch.cat([summed_EX, ours_EX[:, edge:]], dim=1)
    cuts = slice(0, 1), slice(1, edge), slice(edge, None)
    errors_E3 = torch.stack([_relative(whole_EX[:, at], exact_EX[:, at]) for at in cuts], dim=1)
    dist.all_reduce(errors_E3, dist.ReduceOp.MAX)
    return errors_E3, float(_relative(ours_EX[:, 1:edge], exact_EX[:, 1:edge]).median())


def _relative(ours_EX: torch.Tensor, exact_EX: torch.Tensor) -> torch.Tensor:
    """Largest difference over the largest exact value; an exact 0 must be met to 1e-12.

    NaN is infinitely far off: a maximum over ranks may lose it.
    """
    scale_E = exact_EX.abs().amax(1).clamp(min=1e-3)
    return (ours_EX - exact_EX).abs().nan_to_num(torch.inf).amax(1) / scale_E
