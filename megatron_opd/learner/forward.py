"""Runs forward and backward over the micro-batches of a mini-batch, and sums their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model

from megatron_opd.config.estimator import Estimator
from megatron_opd.learner.layout import PackedRows
from megatron_opd.learner.micro_batch import DistilMicro, MicroCache, SftMicro
from megatron_opd.learner.student_logp import Pairs, StudentLogp
from megatron_opd.learner.totals import Totals
from megatron_opd.learner.world import World
from megatron_opd.losses.cache import Cache, Unscored
from megatron_opd.losses.objective import evaluate
from megatron_opd.losses.ratios import ratio_histogram
from megatron_opd.metrics.mismatch_gap import MOST_RATIO

ROUTING_SUMS = ("routing_moved", "routing_pairs", "routing_choices_moved", "routing_choices")
"""Names what MicroRouting.counts returns, in its order."""

MicroT = TypeVar("MicroT", SftMicro, DistilMicro)
LossFn = Callable[[torch.Tensor, MicroT], tuple[torch.Tensor, Totals]]
"""Returns the loss of a micro-batch and its totals; never asked of a filler."""


def sft_loss(
    out_1s: torch.Tensor, micro: SftMicro, *, head: StudentLogp
) -> tuple[torch.Tensor, Totals]:
    """Return the negative log-likelihood of the response tokens, summed."""
    logp_T = head(out_1s, micro.rows, Pairs.of_rows(micro.response_T), 1.0).logp_N
    loss = -logp_T.sum(dtype=torch.float64)
    return loss, Totals.of(
        loss.device, sums={"loss": loss, "count": len(logp_T), "tokens": len(logp_T)}
    )


def distil_loss(
    out_1s: torch.Tensor,
    micro: DistilMicro,
    *,
    head: StudentLogp,
    estimator: Estimator,
    temperature: float,
    measure_mismatch: bool,
    scores_start: bool,
) -> tuple[torch.Tensor, Totals]:
    """Return the configured loss, summed, with its metrics.

    Student log-probs are those of softmax(logits / temperature), the distribution that the sampler
    drew from. measure_mismatch: whether the weights are still those of the batch's version, and the
    sampler kept the whole vocabulary, so that learner and sampler can be compared. scores_start:
    whether the log-probs of the batch's start are those now, unless they came with the micro-batch.
    """
    read = micro.loss_input
    draws = read.draws
    scored = head(out_1s, micro.rows, _pairs_of(read), temperature)
    student_N = scored.logp_N
    result = evaluate(estimator, micro.cache(student_N, scores_start))
    with torch.no_grad():
        by_weight = estimator.support.owner == "student"
        weight_N = draws.weight_N if by_weight else torch.zeros_like(draws.weight_N)
        if not by_weight:
            weight_N.index_fill_(0, draws.path_T, 1.0)
        # Not used_N as an index: that would ask the device how many there are.
        imitated_N = draws.imitation_weight_B[draws.sample_T[draws.row_N]] > 0
        used_N = (weight_N > 0) & ~imitated_N
        weight_N = weight_N.masked_fill(imitated_N, 0.0)
        log_ratio_N = torch.where(used_N, student_N - draws.sampler_logp_N, 0.0)
        compared_T = read.fresh_T & measure_mismatch
        gap_T, k3_T = _path_gap(student_N[draws.path_T], draws, compared_T)
        entropy = {}
        if scored.entropy_T is not None:
            entropy = {"entropy": scored.entropy_T.sum(), "entropy_tokens": len(scored.entropy_T)}
        totals = Totals.of(
            out_1s.device,
            sums={
                "loss": result.loss_sum,
                "count": result.count,
                "tokens": len(gap_T),
                "ids": len(student_N),
                "mismatch": gap_T.sum(),
                "mismatch_k3": k3_T.sum(),
                "mismatch_tokens": compared_T.sum(),
                **entropy,
                **result.sums,
            },
            maxima={
                "mismatch": gap_T.max(),
                "log_ratio": log_ratio_N.masked_fill(~used_N, -torch.inf).max(),
            },
            ratios=ratio_histogram(log_ratio_N, weight_N),
        )
    return result.loss_sum, totals


def _pairs_of(read: MicroCache) -> Pairs:
    return Pairs(read.draws.row_N, read.id_N, read.draws.on_host.row_N)


def _path_gap(
    path_logp_T: torch.Tensor, draws: Unscored, compared_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [T] |p_learner - p_sampler| and k3 (metrics/mismatch_limits.py) of the path tokens.

    float64, as k3 is half the square of a rounding error; 0 where not to be compared.
    """
    learner_T, sampler_T = path_logp_T.double(), draws.sampler_logp_N[draws.path_T].double()
    gap_T = (learner_T.exp() - sampler_T.exp()).abs()
    log_ratio_T = (learner_T - sampler_T).clamp(max=math.log(MOST_RATIO))
    k3_T = torch.expm1(log_ratio_T) - log_ratio_T
    return gap_T.masked_fill(~compared_T, 0), k3_T.masked_fill(~compared_T, 0)


def _path_of(
    out_1s: torch.Tensor, micro: DistilMicro, head: StudentLogp, temperature: float
) -> torch.Tensor:
    """Return [T], the log-probs of the path tokens."""
    path_T, id_N = micro.loss_input.draws.path_T, micro.loss_input.id_N
    return head(out_1s, micro.rows, Pairs.of_rows(id_N[path_T]), temperature).logp_N


def mismatch_totals(
    model: Sequence[DistributedDataParallel],
    micros: Sequence[DistilMicro],
    world: World,
    head: StudentLogp,
    temperature: float,
) -> Totals:
    """Measure the mismatch alone, as distil_loss does, in a forward pass without gradient."""

    def measure(out_1s: torch.Tensor, micro: DistilMicro) -> tuple[torch.Tensor, Totals]:
        logp_T = _path_of(out_1s, micro, head, temperature)
        read = micro.loss_input
        gap_T, k3_T = _path_gap(logp_T.detach(), read.draws, read.fresh_T)
        totals = Totals.of(
            out_1s.device,
            sums={
                "count": 1,
                "mismatch": gap_T.sum(),
                "mismatch_k3": k3_T.sum(),
                "mismatch_tokens": read.fresh_T.sum(),
            },
            maxima={"mismatch": gap_T.max()},
        )
        return logp_T.sum(dtype=torch.float64), totals

    return run_mini_batch(model, head, micros, measure, world, forward_only=True)


def path_logp(
    model: Sequence[DistributedDataParallel],
    micros: Sequence[DistilMicro],
    world: World,
    head: StudentLogp,
    temperature: float,
) -> tuple[list[torch.Tensor], Totals]:
    """Return [T] of each micro-batch, the path tokens' log-probs as distil_loss computes them.

    Fillers have none. No gradient; empty on ranks that compute no logits. The totals count routing
    alone.
    """
    found: list[torch.Tensor] = []

    def collect(out_1s: torch.Tensor, micro: DistilMicro) -> tuple[torch.Tensor, Totals]:
        logp_T = _path_of(out_1s, micro, head, temperature)
        found.append(logp_T.detach())
        return logp_T.sum(dtype=torch.float64), Totals.of(out_1s.device, sums={"count": 1})

    totals = run_mini_batch(model, head, micros, collect, world, forward_only=True)
    return found, totals


def collect_caches(
    model: Sequence[DistributedDataParallel],
    micros: Sequence[DistilMicro],
    world: World,
    head: StudentLogp,
    temperature: float,
) -> list[Cache]:
    """Return each micro-batch's cache with the student's log-probs now, without gradient.

    Fillers have none. Empty on ranks that compute no logits.
    """
    caches: list[Cache] = []

    def collect(out_1s: torch.Tensor, micro: DistilMicro) -> tuple[torch.Tensor, Totals]:
        read = micro.loss_input
        scored = head(out_1s, micro.rows, _pairs_of(read), temperature)
        logp_N = scored.logp_N.detach()
        caches.append(micro.cache(logp_N, prox_is_student=False))
        return logp_N.sum(dtype=torch.float64), Totals.of(logp_N.device, sums={"count": 1})

    run_mini_batch(model, head, micros, collect, world, forward_only=True)
    return caches


def run_mini_batch(
    model: Sequence[DistributedDataParallel],
    head: StudentLogp,
    micros: Sequence[MicroT],
    loss_fn: LossFn[MicroT],
    world: World,
    *,
    forward_only: bool = False,
) -> Totals:
    """Compute gradients of the mini-batch's mean loss, into the buffers of the model's chunks.

    Megatron's schedule sums the micro-batches' losses and divides the gradient by the count of all
    ranks. Fillers add nothing to either. Returns the global totals, the same on every rank.
    """
    settings: Any = model[0].config
    routes = settings.num_moe_experts is not None
    balanced = routes and (
        settings.moe_aux_loss_coeff
        or settings.moe_z_loss_coeff
        or settings.moe_router_enable_expert_bias
    )

    def forward_step(micros_left: Any, module: Any) -> tuple[torch.Tensor, Any]:
        micro = next(micros_left)
        masked = balanced or (routes and micro.rows.is_filler)
        out = module(
            micro.rows.ids_1s,
            None,  # positions: rotary angles come from the packing
            None,
            packed_seq_params=micro.rows.packing,
            padding_mask=_unrouted(micro.rows, module, world) if masked else None,
        )

        def loss(out_1s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Totals]:
            if micro.rows.is_filler:
                loss_sum, totals = _nothing(out_1s, micro.rows, head)
            else:
                loss_sum, totals = loss_fn(out_1s, micro)
            # Context-parallel ranks compute the same loss; Megatron adds up their counts.
            count = totals.count()
            return loss_sum, count if world.cp_rank == 0 else torch.zeros_like(count), totals

        return out, loss

    if not forward_only:
        for chunk in model:
            chunk.zero_grad_buffer()
    interleaved = len(model) > 1
    if interleaved:
        group = pipeline_group(len(micros), world.parallel.pp)
        settings.microbatch_group_size_per_vp_stage = group
    iterators = [iter(micros) for _ in model]
    with torch.set_grad_enabled(not forward_only):
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=list(model),
            num_microbatches=len(micros),
            seq_length=micros[0].rows.total_tokens,  # ignored with variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return _reduce(outputs, micros, world)


def _nothing(
    out_1s: torch.Tensor, rows: PackedRows, head: StudentLogp
) -> tuple[torch.Tensor, Totals]:
    """Return the loss of a filler: zero, with a gradient of zero for every weight."""
    zero_T = torch.zeros(rows.num_tokens, dtype=torch.int64, device=out_1s.device)
    pairs = Pairs(zero_T, zero_T, np.zeros(rows.num_tokens, np.int64))
    logp_T = head(out_1s, rows, pairs, 1.0).logp_N
    return 0 * logp_T.sum(dtype=torch.float64), Totals.zero(out_1s.device)


def _unrouted(rows: PackedRows, module: Any, world: World) -> torch.Tensor:
    """Return the filler positions, which balancing losses leave out.

    With sequence parallelism Megatron cuts the mask on the first stage only.
    """
    chunk = get_attr_wrapped_model(module, "pre_process", return_model_obj=True)
    if chunk.pre_process or world.parallel.tp == 1:
        return rows.filler_1s
    return rows.filler_1s.chunk(world.parallel.tp, dim=1)[world.tp_rank]


def pipeline_group(num_micros: int, stages: int) -> int:
    """Return the micro-batches that a chunk of an interleaved pipeline takes in one turn.

    The least number that Megatron's schedule accepts: at least `stages`, and so is what remains.
    """
    for size in range(stages, num_micros + 1):
        if num_micros % size == 0 or num_micros % size >= stages:
            return size
    raise ValueError(
        "an interleaved pipeline needs at least as many micro-batches as stages, "
        f"got {num_micros} and {stages}"
    )


def _reduce(outputs: Sequence[Totals], micros: Sequence[MicroT], world: World) -> Totals:
    """Sum to global totals, on every rank; each sample counts once, however many ranks share it.

    Each rank has routers of its own.
    """
    mine = routing_counts(micros, world.device)
    if world.counts:
        for totals in outputs:
            mine = mine.plus(totals)
    if world.size > 1:
        dist.all_reduce(mine.sums)
        dist.all_reduce(mine.maxima, dist.ReduceOp.MAX)
    return mine


def routing_counts(micros: Sequence[MicroT], device: torch.device) -> Totals:
    """Count what routing replay changed on this rank."""
    total = torch.zeros(len(ROUTING_SUMS), dtype=torch.float64, device=device)
    for micro in micros:
        routing = micro.rows.packing.routing
        if routing is not None:
            total += routing.counts()
    return Totals.of(device, sums=dict(zip(ROUTING_SUMS, total.unbind(), strict=True)))
