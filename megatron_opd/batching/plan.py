"""Assigns each sequence to a mini-batch, a data-parallel rank and a micro-batch. Torch-free.

Invariants: every sequence appears exactly once; a mini-batch holds consecutive samples (admission
order), with all their sequences; every rank holds a sequence of it, and as many micro-batches as
its peers, because they meet in collectives. A rank that cannot fill as many has empty ones,
fillers, which compute nothing that counts. No micro-batch exceeds the token budget unless one
sequence alone does; the heaviest of a rank come first, so that those which ranks or pipeline stages
compute together are alike. The sequences of a sample may go to different ranks and micro-batches:
what they have in common is in the columns of each (batching/advantages.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from megatron_opd.batching.per_rank import pack_per_rank
from megatron_opd.batching.steps import Micro, by_rank, pack_steps
from megatron_opd.config.learner import LearnerConfig

BatchPlan = list[list[list[Micro]]]
"""The micro-batches of every rank, listed by mini-batch and rank."""


def learner_plan(lengths: Sequence[Sequence[int]], config: LearnerConfig) -> BatchPlan:
    """Make the plan that a learner of this layout needs. lengths: see plan_batch.

    Context-parallel ranks share a micro-batch, and each sequence fills 2 * cp equal chunks of it;
    an interleaved pipeline needs at least pp micro-batches.
    """
    parallel = config.parallel
    unit = 2 * parallel.cp if parallel.cp > 1 else 1
    return plan_batch(
        [[-(-length // unit) * unit for length in own] for own in lengths],
        config.num_mini_batches,
        parallel.dp,
        config.max_tokens_per_microbatch * parallel.cp,
        least_micros=parallel.least_micros,
        lockstep=parallel.shares_experts,
    )


def plan_batch(
    lengths: Sequence[Sequence[int]],
    num_mini_batches: int,
    data_parallel: int,
    token_budget: int,
    least_micros: int = 1,
    *,
    lockstep: bool = False,
) -> BatchPlan:
    """Return plan[mini-batch][data-parallel rank][micro-batch] = ascending indices of sequences.

    lengths: tokens (given and sampled) of every sequence of every sample, in admission order;
    sequences are numbered through. token_budget: most tokens of a micro-batch. least_micros: of a
    rank in a mini-batch. lockstep: whether ranks meet in every layer instead of at the end of a
    mini-batch. Raises ValueError when the samples are no multiple of num_mini_batches, or a
    mini-batch has fewer than least_micros for some rank.
    """
    per_mini, rest = divmod(len(lengths), num_mini_batches)
    least = least_micros * data_parallel
    if rest or per_mini < least:
        raise ValueError(
            f"a batch must hold equal mini-batches of at least {least} samples ({least_micros} for "
            f"each of {data_parallel} data-parallel ranks), got {len(lengths)} samples and "
            f"num_mini_batches={num_mini_batches}"
        )
    plan: BatchPlan = []
    flat = list(chain.from_iterable(lengths))
    starts = [0, *accumulate(len(own) for own in lengths)]
    for start in range(0, len(lengths), per_mini):
        mini = range(starts[start], starts[start + per_mini])
        wanted = {"ranks": data_parallel, "budget": token_budget, "least": least_micros}
        if lockstep:
            ranks = by_rank(pack_steps(mini, flat, **wanted), flat)
        else:
            ranks = pack_per_rank(mini, flat, **wanted)
        plan.append([[sorted(micro) for micro in micros] for micros in ranks])
    return plan
