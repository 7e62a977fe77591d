"""Computes the student's log-probs from what the model returns at its last stage.

Axes: s packed positions of this rank, T response tokens, t those predicted on this rank, N (token,
id) pairs, n pairs of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from megatron_opd.config.learner import HeadLogp
from megatron_opd.learner.layout import PackedRows
from megatron_opd.learner.lm_head import head_slice, install_lean_head
from megatron_opd.losses.blocks import default_block
from megatron_opd.losses.host import Index, sent
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.vocab_parallel import gather_logp


@dataclass(frozen=True)
class Pairs:
    """Holds (row, id) pairs to score. row_N, id_N: int64. host_row_N: row_N, on the host."""

    row_N: torch.Tensor
    id_N: torch.Tensor
    host_row_N: Index

    @classmethod
    def of_rows(cls, id_T: torch.Tensor) -> Self:
        """Make one pair of every row."""
        return cls(torch.arange(len(id_T), device=id_T.device), id_T, np.arange(len(id_T)))


@dataclass(frozen=True)
class ScoredLogp:
    """Holds the scores. logp_N: [N] float32. entropy_T: nats, where it comes for free."""

    logp_N: torch.Tensor
    entropy_T: torch.Tensor | None


class StudentLogp(Protocol):
    """Computes log softmax(logits / temperature) of response positions at (row_N, id_N)."""

    def __call__(
        self, out_1s: torch.Tensor, rows: PackedRows, pairs: Pairs, temperature: float
    ) -> ScoredLogp:
        """Score pairs. out_1s: the model's output for all packed positions."""
        ...


def dense_logp(
    out_1s: torch.Tensor, rows: PackedRows, pairs: Pairs, temperature: float
) -> ScoredLogp:
    """Score from logits [1, s, v]: the reference that LeanLogp is checked against."""
    logits_tv = out_1s[0].index_select(0, rows.logit_row_t)
    group: Any = ps.get_tensor_model_parallel_group()
    logp_N = gather_logp(logits_tv, pairs.row_N, pairs.id_N, temperature=temperature, group=group)
    return ScoredLogp(logp_N, None)


class LeanLogp:
    """Scores from the LM head's input [1, s, H], never holding [T, V].

    model: with a lean head. eager: without fused kernels. entropy: whether updates measure it.
    """

    def __init__(self, model: Any, *, eager: bool = False, entropy: bool = True) -> None:
        self._model, self._eager, self._entropy = model, eager, entropy

    def __call__(
        self, out_1s: torch.Tensor, rows: PackedRows, pairs: Pairs, temperature: float
    ) -> ScoredLogp:
        """Score blockwise, without logits; arguments as StudentLogp says."""
        hidden_tH = out_1s[0].index_select(0, rows.logit_row_t)
        scored = lean_logp(
            hidden_tH,
            head_slice(self._model),
            pairs.row_N,
            pairs.id_N,
            temperature=temperature,
            block=default_block(hidden_tH) if self._eager else None,
            entropy=self._entropy and torch.is_grad_enabled(),
        )
        entropy_T = scored.entropy_T
        return ScoredLogp(scored.logp_N, None if entropy_T is None else entropy_T.detach())


class AcrossContext:
    """Joins the log-probs of all response tokens on every context-parallel rank.

    The loss is then computed whole on each rank, because it may compare tokens of different ranks.
    Every rank takes back the gradient of its own log-probs alone, so nothing counts twice.
    """

    def __init__(self, head: StudentLogp, group: dist.ProcessGroup) -> None:
        self._head, self._group = head, group

    def __call__(
        self, out_1s: torch.Tensor, rows: PackedRows, pairs: Pairs, temperature: float
    ) -> ScoredLogp:
        """Score this rank's chunks and join them with the other ranks'."""
        local_T = np.full(rows.num_tokens, -1)
        local_T[rows.token_t] = np.arange(len(rows.token_t))
        local_N = local_T[pairs.host_row_N]
        mine_n = np.flatnonzero(local_N >= 0)
        place_n, local_n = sent(mine_n, out_1s.device), local_N[mine_n]
        mine = Pairs(sent(local_n, out_1s.device), pairs.id_N[place_n], local_n)
        scored = self._head(out_1s, rows, mine, temperature)
        logp_N = self._joined(scored.logp_N, place_n, len(local_N))
        if scored.entropy_T is None:
            return ScoredLogp(logp_N, None)
        place_t = sent(rows.token_t, out_1s.device)
        return ScoredLogp(logp_N, self._joined(scored.entropy_T, place_t, rows.num_tokens))

    def _joined(self, value_n: torch.Tensor, place_n: torch.Tensor, length: int) -> torch.Tensor:
        """Sum all ranks' values, each at its place; backward takes this rank's places."""
        spread = value_n.new_zeros(length).index_copy(0, place_n, value_n)
        return reduce_from_tensor_model_parallel_region(spread, group=self._group)  # type: ignore[arg-type]


def make_student_logp(model: Any, kind: HeadLogp, *, entropy: bool = True) -> StudentLogp:
    """Make the configured scorer; lean changes `model` so that it returns the LM head's input.

    entropy: whether updates measure it.
    """
    head: StudentLogp = dense_logp
    if kind != "dense":
        install_lean_head(model)
        head = LeanLogp(model, eager=kind == "lean_eager", entropy=entropy)
    group: Any = ps.get_context_parallel_group()
    return head if group.size() == 1 else AcrossContext(head, group)
