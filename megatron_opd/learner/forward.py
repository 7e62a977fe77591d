"""Forward and backward over the micro-batches of a mini-batch, and the sums that come out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_opd.config.schema import ObjectiveConfig
from megatron_opd.learner.micro_batch import DistilMicro, Rows, SftMicro
from megatron_opd.learner.setup import World
from megatron_opd.learner.totals import Totals
from megatron_opd.losses.objective import reverse_kl
from megatron_opd.losses.ratios import ratio_histogram
from megatron_opd.losses.vocab_parallel import gather_logp

MicroT = TypeVar("MicroT", SftMicro, DistilMicro)
LossFn = Callable[[torch.Tensor, MicroT], tuple[torch.Tensor, Totals]]


def sft_loss(logits_1Sv: torch.Tensor, micro: SftMicro) -> tuple[torch.Tensor, Totals]:
    """Negative log-likelihood of the response tokens, summed."""
    logits_Tv = _response_logits(logits_1Sv, micro.rows)
    row_T = torch.arange(len(logits_Tv), device=logits_Tv.device)
    logp_T = gather_logp(logits_Tv, row_T, micro.response_T, group=_vocab_group())
    loss = -logp_T.sum(dtype=torch.float64)
    return loss, Totals.of(loss.device, sums={"loss": loss, "tokens": len(row_T)})


def distil_loss(
    logits_1Sv: torch.Tensor,
    micro: DistilMicro,
    *,
    objective: ObjectiveConfig,
    temperature: float,
    first_mini: bool,
) -> tuple[torch.Tensor, Totals]:
    """The configured objective, summed over response tokens, with its metrics.

    Student log-probs are those of softmax(logits / temperature), the distribution that the sampler
    drew from. first_mini: whether the weights are still those of the batch's version, and the
    sampler kept the whole vocabulary, so that the learner-sampler mismatch can be measured.
    """
    logits_Tv = _response_logits(logits_1Sv, micro.rows)
    student_logp_N = gather_logp(
        logits_Tv, micro.row_N, micro.id_N, temperature=temperature, group=_vocab_group()
    )
    result = reverse_kl(
        student_logp_N,
        micro.sampler_logp_N,
        micro.teacher_logp_N,
        micro.weight_N,
        max_ratio=objective.max_ratio,
    )
    with torch.no_grad():
        drawn_N = micro.weight_N > 0
        log_ratio_N = (student_logp_N - micro.sampler_logp_N)[drawn_N]
        path_logp_T = student_logp_N[micro.path_T], micro.sampler_logp_N[micro.path_T]
        gap_T = (path_logp_T[0].exp() - path_logp_T[1].exp()).abs()
        fresh_T = micro.fresh_T & first_mini
        gap_T = gap_T.masked_fill(~fresh_T, 0)
        totals = Totals.of(
            logits_Tv.device,
            sums={
                "loss": result.loss_sum,
                "reverse_kl": result.reverse_kl_sum,
                "truncated_weight": result.truncated_weight,
                "weight": micro.weight_N.sum(),
                "tokens": len(gap_T),
                "ids": len(student_logp_N),
                "mismatch": gap_T.sum(),
                "mismatch_tokens": fresh_T.sum(),
            },
            maxima={"mismatch": gap_T.max(), "log_ratio": log_ratio_N.max()},
            ratios=ratio_histogram(log_ratio_N, micro.weight_N[drawn_N]),
        )
    return result.loss_sum, totals


def run_mini_batch(
    model: DistributedDataParallel,
    micros: Sequence[MicroT],
    loss_fn: LossFn[MicroT],
    world: World,
    *,
    forward_only: bool = False,
) -> Totals:
    """Gradients of the mini-batch's mean loss per response token, into the model's buffers.

    Megatron's schedule sums the micro-batches' losses and divides the gradient by the token count
    of all ranks. Returns the global totals, the same on every rank.
    """

    def forward_step(micros_left: Any, module: Any) -> tuple[torch.Tensor, Any]:
        micro = next(micros_left)
        out = module(
            micro.rows.ids_1S,
            None,  # positions: rotary angles come from the packing
            None,
            packed_seq_params=micro.rows.packing,
        )

        def loss(logits_1Sv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Totals]:
            loss_sum, totals = loss_fn(logits_1Sv, micro)
            return loss_sum, totals.tokens().to(torch.int), totals

        return out, loss

    if not forward_only:
        model.zero_grad_buffer()
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micros),
        model=[model],
        num_microbatches=len(micros),
        seq_length=1,  # ignored: variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return _reduce(outputs, world)


def _reduce(outputs: Sequence[Totals], world: World) -> Totals:
    """Global totals, on every rank; each sample counts once, however many ranks share it."""
    mine = Totals.zero(world.device)
    if world.last_stage and world.tp_rank == 0:
        for totals in outputs:
            mine = mine.plus(totals)
    if world.size > 1:
        dist.all_reduce(mine.sums)
        dist.all_reduce(mine.maxima, dist.ReduceOp.MAX)
    return mine


def _response_logits(logits_1Sv: torch.Tensor, rows: Rows) -> torch.Tensor:
    return logits_1Sv[0].index_select(0, rows.logit_row_T)


def _vocab_group() -> dist.ProcessGroup:
    group: Any = ps.get_tensor_model_parallel_group()
    return group
