"""Packs a mini-batch for data-parallel ranks that wait for each other at its end alone. Torch-free.

Such a mini-batch takes as long as the rank with most tokens. Every rank gets as many samples as its
peers, or one more where ranks do not divide them, and nearly as many tokens, and packs them into
nearly equal micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heapreplace

from megatron_opd.batching.bins import FirstFitBins
from megatron_opd.batching.steps import Micro, load_of


def pack_per_rank(
    samples: Sequence[int], lengths: Sequence[int], *, ranks: int, budget: int, least: int = 1
) -> list[list[Micro]]:
    """Return each rank's micro-batches, as many on every rank and at least `least`; heaviest first.

    Empty ones, fillers, are last, on a rank that has fewer samples than another has micro-batches.
    samples: indices into lengths, at least least * ranks of them.
    """
    shares = share_out(samples, lengths, ranks)
    fits = [_fit(share, lengths, budget) for share in shares]
    count = max(least, *(len(micros) for micros in fits))
    return [
        sorted(
            _balanced(share, lengths, count, budget) or _split_up(micros, lengths, count),
            key=lambda micro: (-load_of(micro, lengths), micro[:1]),
        )
        for share, micros in zip(shares, fits, strict=True)
    ]


def share_out(samples: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Split into equal counts; the longest sample goes to the rank with the fewest tokens.

    Where that leaves a rest, as many ranks hold one sample more.
    """
    each, rest = divmod(len(samples), ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]  # a heap, by tokens
    for sample in sorted(samples, key=lambda index: (-lengths[index], index)):
        while len(shares[open_ranks[0][1]]) >= each + (rest > 0):
            heappop(open_ranks)
        tokens, rank = open_ranks[0]
        shares[rank].append(sample)
        rest -= len(shares[rank]) > each
        heapreplace(open_ranks, (tokens + lengths[sample], rank))
    return shares


def _fit(share: Sequence[int], lengths: Sequence[int], budget: int) -> list[Micro]:
    """Pack first-fit decreasing bins of at most `budget` tokens; a longer sample is alone."""
    micros: list[Micro] = [[] for _ in share]
    bins = FirstFitBins(budget, len(share))
    for sample in sorted(share, key=lambda index: (-lengths[index], index)):
        micros[bins.take(lengths[sample])].append(sample)
    return [micro for micro in micros if micro]


def _balanced(
    share: Sequence[int], lengths: Sequence[int], count: int, budget: int
) -> list[Micro] | None:
    """Make `count` micro-batches of nearly equal tokens: the longest sample to the lightest.

    None when one would exceed what first-fit packing keeps: the budget, or one sample alone.
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
    """Halve the heaviest divisible micro-batch until there are `count`; then add empty ones."""
    micros = [list(micro) for micro in micros]
    while len(micros) < count:
        divisible = [i for i, micro in enumerate(micros) if len(micro) > 1]
        if not divisible:
            return micros + [[]] * (count - len(micros))
        heaviest = max(divisible, key=lambda i: (load_of(micros[i], lengths), -i))
        ordered = sorted(micros.pop(heaviest), key=lambda index: (-lengths[index], index))
        micros += [ordered[::2], ordered[1::2]]
    return micros
