"""The student's log-probs from what the model returns at its last stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from megatron_opd.learner.lm_head import head_weight, install_lean_head, real_vocab_size
from megatron_opd.learner.micro_batch import Rows
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.vocab_parallel import gather_logp


@dataclass(frozen=True)
class Scored:
    """logp_N: [N] float32. entropy_T: nats, where it comes for free."""

    logp_N: torch.Tensor
    entropy_T: torch.Tensor | None


class StudentLogp(Protocol):
    """Log softmax(logits / temperature) of response positions at (row_N, id_N)."""

    def __call__(
        self,
        out_1S: torch.Tensor,
        rows: Rows,
        row_N: torch.Tensor,
        id_N: torch.Tensor,
        temperature: float,
    ) -> Scored:
        """out_1S: the model's output for all packed positions."""
        ...


def dense_logp(
    out_1S: torch.Tensor, rows: Rows, row_N: torch.Tensor, id_N: torch.Tensor, temperature: float
) -> Scored:
    """From logits [1, S, v]: what LeanLogp is checked against."""
    logits_Tv = out_1S[0].index_select(0, rows.logit_row_T)
    group = _vocab_group()
    return Scored(gather_logp(logits_Tv, row_N, id_N, temperature=temperature, group=group), None)


class LeanLogp:
    """From the LM head's input [1, S, H], never holding [T, V]. model: with a lean head."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self,
        out_1S: torch.Tensor,
        rows: Rows,
        row_N: torch.Tensor,
        id_N: torch.Tensor,
        temperature: float,
    ) -> Scored:
        """See StudentLogp."""
        hidden_TH = out_1S[0].index_select(0, rows.logit_row_T)
        scored = lean_logp(
            hidden_TH,
            head_weight(self._model),
            row_N,
            id_N,
            temperature=temperature,
            group=_vocab_group(),
            vocab_size=real_vocab_size(self._model),
        )
        return Scored(scored.logp_N, scored.entropy_T.detach())


def _vocab_group() -> dist.ProcessGroup:
    group: Any = ps.get_tensor_model_parallel_group()
    return group


def make_student_logp(model: Any, kind: str) -> StudentLogp:
    """The configured way; lean changes `model` so that it returns the LM head's input."""
    if kind == "dense":
        return dense_logp
    install_lean_head(model)
    return LeanLogp(model)
