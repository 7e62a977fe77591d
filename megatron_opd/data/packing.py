"""Which sample goes to which mini-batch, data-parallel rank and micro-batch. Pure and torch-free.

Invariants: every sample appears exactly once; a mini-batch holds consecutive samples (admission
order); every rank holds as many samples and as many micro-batches as its peers, for they meet in
collectives; no micro-batch is empty, and none exceeds the token budget unless one sample alone
does.
"""

from __future__ import annotations

from collections.abc import Sequence

Micro = list[int]
Plan = list[list[list[Micro]]]


def plan_batch(
    lengths: Sequence[int], mini_batches: int, data_parallel: int, token_budget: int
) -> Plan:
    """plan[mini-batch][data-parallel rank][micro-batch] = ascending sample indices.

    lengths: tokens (prompt + response) of every sample, in admission order. token_budget: most
    tokens of a micro-batch. Raises ValueError when the samples cannot be shared out equally.
    """
    shares = mini_batches * data_parallel
    if not lengths or len(lengths) % shares:
        raise ValueError(
            "a batch must hold a positive multiple of mini_batches * data-parallel size samples, "
            f"got {len(lengths)} and {mini_batches} * {data_parallel}"
        )
    per_mini = len(lengths) // mini_batches
    return [
        _plan_mini(
            range(start, start + per_mini),
            lengths,
            data_parallel=data_parallel,
            budget=token_budget,
        )
        for start in range(0, len(lengths), per_mini)
    ]


def _plan_mini(
    samples: Sequence[int], lengths: Sequence[int], *, data_parallel: int, budget: int
) -> list[list[Micro]]:
    ranks = [_fit(share, lengths, budget) for share in _share(samples, lengths, data_parallel)]
    count = max(len(micros) for micros in ranks)
    return [
        sorted(sorted(micro) for micro in _split_up(micros, lengths, count)) for micros in ranks
    ]


def _share(samples: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Equal counts; token sums balanced greedily, the longest sample to the lightest open rank."""
    each = len(samples) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for sample in sorted(samples, key=lambda index: (-lengths[index], index)):
        open_ranks = [rank for rank in range(ranks) if len(shares[rank]) < each]
        rank = min(open_ranks, key=lambda index: (loads[index], index))
        shares[rank].append(sample)
        loads[rank] += lengths[sample]
    return shares


def _fit(share: Sequence[int], lengths: Sequence[int], budget: int) -> list[Micro]:
    """First-fit decreasing bins of at most `budget` tokens; a longer sample is alone in its bin."""
    bins: list[Micro] = []
    free: list[int] = []
    for sample in sorted(share, key=lambda index: (-lengths[index], index)):
        spot = next((i for i, room in enumerate(free) if lengths[sample] <= room), None)
        if spot is None:
            bins.append([sample])
            free.append(budget - lengths[sample])
        else:
            bins[spot].append(sample)
            free[spot] -= lengths[sample]
    return bins


def _split_up(micros: list[Micro], lengths: Sequence[int], count: int) -> list[Micro]:
    """Halve the heaviest divisible micro-batch until there are `count`."""
    micros = [list(micro) for micro in micros]
    while len(micros) < count:
        divisible = [i for i, micro in enumerate(micros) if len(micro) > 1]
        heaviest = max(divisible, key=lambda i: (sum(lengths[s] for s in micros[i]), -i))
        ordered = sorted(micros.pop(heaviest), key=lambda index: (-lengths[index], index))
        micros += [ordered[::2], ordered[1::2]]
    return micros
