"""Cases of the lean log-prob operation, and the dense one that it must equal."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron_opd.losses.lean import LogProbs
from megatron_opd.losses.passes import HeadSlice

Operation = Callable[..., LogProbs]


class Case(NamedTuple):
    """Inputs, and one upstream gradient for each result."""

    hidden_TH: torch.Tensor
    weight_vH: torch.Tensor
    row_N: torch.Tensor
    id_N: torch.Tensor
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case(rows: int, ids: int, width: int, pairs: int, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(rows * 1000 + ids * 100 + width * 10 + pairs)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    pairs = pairs if rows else 0
    row_N = torch.randint(max(rows, 1), (pairs,), generator=generator)
    id_N = torch.randint(ids, (pairs,), generator=generator)
    id_N[: pairs // 4], id_N[pairs // 4 : pairs // 2] = 0, ids - 1  # the edges, repeated
    hidden_TH, weight_vH = (2 * normal(rows, width)).to(dtype), normal(ids, width).to(dtype)
    return Case(hidden_TH, weight_vH, row_N, id_N, (normal(pairs), normal(rows), normal(rows)))


def exactly(given_case: Case) -> Case:
    """The same numbers in float64, so that the oracle's gradients are not rounded."""
    hidden_TH, weight_vH = given_case.hidden_TH.double(), given_case.weight_vH.double()
    return given_case._replace(hidden_TH=hidden_TH, weight_vH=weight_vH)


def dense(
    hidden_TH: torch.Tensor,
    head: HeadSlice,
    row_N: torch.Tensor,
    id_N: torch.Tensor,
    temperature: float = 1.0,
) -> LogProbs:
    logits_TV = hidden_TH @ head.weight_vH.T / temperature
    logp_TV = torch.log_softmax(logits_TV, 1)
    entropy_T = -(logp_TV.exp() * logp_TV).sum(1)
    return LogProbs(logp_TV[row_N, id_N], torch.logsumexp(logits_TV, 1), entropy_T)


def outcome(
    operation: Operation,
    given_case: Case,
    *,
    group: Any = None,
    vocab_size: int | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Results and gradients of both inputs, in float64."""
    hidden_TH, weight_vH = (t.detach().clone().requires_grad_() for t in given_case[:2])
    head = HeadSlice(weight_vH, group, vocab_size)
    found = operation(hidden_TH, head, given_case.row_N, given_case.id_N, **options)
    results = (found.logp_N, found.log_normaliser_T, found.entropy_T)
    torch.autograd.backward(results, [g.to(results[0].dtype) for g in given_case.grads])
    names = ("logp_N", "log_normaliser_T", "entropy_T", "grad_hidden", "grad_weight")
    values = (*results, hidden_TH.grad, weight_vH.grad)
    pairs = zip(names, values, strict=True)
    return {name: value.detach().double() for name, value in pairs if value is not None}
