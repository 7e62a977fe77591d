"""Assigns each sample to a mini-batch, a data-parallel rank and a micro-batch. Torch-free.

Invariants: every sample appears exactly once; a mini-batch holds consecutive samples (admission
order); every rank holds as many samples and as many micro-batches as its peers, because they meet
in collectives; no micro-batch is empty, and none exceeds the token budget unless one sample alone
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heapreplace

from megatron_opd.batching.rooms import Rooms
from megatron_opd.config.learner import LearnerConfig

Micro = list[int]
BatchPlan = list[list[list[Micro]]]
"""The micro-batches of every rank, listed by mini-batch and rank."""


def learner_plan(lengths: Sequence[int], config: LearnerConfig) -> BatchPlan:
    """Make the plan that a learner of this layout needs. lengths: see plan_batch.

    Context-parallel ranks share a micro-batch, and each sample fills 2 * cp equal chunks of it; an
    interleaved pipeline needs at least pp micro-batches.
    """
    parallel = config.parallel
    unit = 2 * parallel.cp if parallel.cp > 1 else 1
    return plan_batch(
        [-(-length // unit) * unit for length in lengths],
        config.num_mini_batches,
        parallel.dp,
        config.max_tokens_per_microbatch * parallel.cp,
        least_micros=parallel.pp if parallel.vpp > 1 else 1,
    )


def plan_batch(
    lengths: Sequence[int],
    num_mini_batches: int,
    data_parallel: int,
    token_budget: int,
    least_micros: int = 1,
) -> BatchPlan:
    """Return plan[mini-batch][data-parallel rank][micro-batch] = ascending sample indices.

    lengths: tokens (prompt + response) of every sample, in admission order. token_budget: most
    tokens of a micro-batch. least_micros: of a rank in a mini-batch. Raises ValueError when the
    samples cannot be shared out equally, or are fewer than least_micros.
    """
    shares = num_mini_batches * data_parallel
    if not lengths or len(lengths) % shares:
        raise ValueError(
            "a batch must hold a positive multiple of num_mini_batches * data-parallel size "
            f"samples, got {len(lengths)} and {num_mini_batches} * {data_parallel}"
        )
    per_mini = len(lengths) // num_mini_batches
    if per_mini < least_micros * data_parallel:
        raise ValueError(
            f"a rank's share of a mini-batch must hold at least {least_micros} samples, "
            f"got {per_mini // data_parallel}"
        )
    return [
        _plan_mini(
            range(start, start + per_mini),
            lengths,
            data_parallel=data_parallel,
            budget=token_budget,
            least=least_micros,
        )
        for start in range(0, len(lengths), per_mini)
    ]


def _plan_mini(
    samples: Sequence[int],
    lengths: Sequence[int],
    *,
    data_parallel: int,
    budget: int,
    least: int,
) -> list[list[Micro]]:
    shares = share_out(samples, lengths, data_parallel)
    fits = [_fit(share, lengths, budget) for share in shares]
    count = max(least, *(len(micros) for micros in fits))
    return [
        sorted(
            sorted(micro)
            for micro in _balanced(share, lengths, count, budget)
            or _split_up(micros, lengths, count)
        )
        for share, micros in zip(shares, fits, strict=True)
    ]


def share_out(samples: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Split into equal counts; the longest sample goes to the rank with the fewest tokens."""
    each = len(samples) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]  # a heap, by tokens
    for sample in sorted(samples, key=lambda index: (-lengths[index], index)):
        tokens, rank = open_ranks[0]
        shares[rank].append(sample)
        if len(shares[rank]) < each:
            heapreplace(open_ranks, (tokens + lengths[sample], rank))
        else:
            heappop(open_ranks)
    return shares


def _fit(share: Sequence[int], lengths: Sequence[int], budget: int) -> list[Micro]:
    """Pack first-fit decreasing bins of at most `budget` tokens; a longer sample is alone."""
    bins: list[Micro] = [[] for _ in share]
    rooms = Rooms(budget, len(share))
    for sample in sorted(share, key=lambda index: (-lengths[index], index)):
        bins[rooms.take(lengths[sample])].append(sample)
    return [micro for micro in bins if micro]


def _balanced(
    share: Sequence[int], lengths: Sequence[int], count: int, budget: int
) -> list[Micro] | None:
    """Make `count` micro-batches of nearly equal tokens: the longest sample to the lightest.

    None when one would exceed what first-fit packing keeps: the budget, or one sample alone.
    Ranks meet in collectives micro-batch by micro-batch, so the heaviest sets the pace of all.
    """
    micros: list[Micro] = [[] for _ in range(count)]
    loads = [(0, i) for i in range(count)]  # a heap
    for sample in sorted(share, key=lambda index: (-lengths[index], index)):
        load, lightest = loads[0]
        micros[lightest].append(sample)
        heapreplace(loads, (load + lengths[sample], lightest))
    too_much = any(load > budget and len(micros[i]) > 1 for load, i in loads)
    return None if too_much or not all(micros) else micros


def _split_up(micros: list[Micro], lengths: Sequence[int], count: int) -> list[Micro]:
    """Halve the heaviest divisible micro-batch until there are `count`."""
    micros = [list(micro) for micro in micros]
    while len(micros) < count:
        divisible = [i for i, micro in enumerate(micros) if len(micro) > 1]
        heaviest = max(divisible, key=lambda i: (sum(lengths[s] for s in micros[i]), -i))
        ordered = sorted(micros.pop(heaviest), key=lambda index: (-lengths[index], index))
        micros += [ordered[::2], ordered[1::2]]
    return micros
