"""Packs a mini-batch into steps: the micro-batches that the data-parallel ranks compute together.

Ranks that share experts meet in every layer, so that a step takes as long as its heaviest
micro-batch. The sum of that over the steps is kept small: steps are filled one after another, the
longest samples first, each up to the tokens that its longest sample takes in any case, or up to an
equal part of what is left if that is more. Torch-free.

Invariants: every sample appears exactly once; each step has one micro-batch for every rank; none is
empty but of a step for which fewer samples than ranks are left; none exceeds the token budget
unless it is one sample alone; steps come heaviest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heapreplace

from megatron_opd.batching.bins import FirstFitBins

Micro = list[int]
Step = list[Micro]
"""The micro-batches that the ranks compute at the same time, heaviest first."""


def pack_steps(
    samples: Sequence[int], lengths: Sequence[int], *, ranks: int, budget: int, least: int = 1
) -> list[Step]:
    """Return the steps of one mini-batch, at least `least` and as few as can be found.

    samples: indices into lengths, at least least * ranks of them.
    """
    order = sorted(samples, key=lambda index: (-lengths[index], index))
    bins = FirstFitBins(budget, len(order))
    fewest = 1 + max(bins.take(lengths[index]) for index in order)
    count = max(least, -(-fewest // ranks))
    # One sample a micro-batch always works: the search ends.
    while (steps := _filled(order, lengths, count, ranks, budget)) is None:
        count += 1
    return steps


def by_rank(steps: Sequence[Step], lengths: Sequence[int]) -> list[list[Micro]]:
    """Return each rank's micro-batches, in the order of the steps.

    Of each step the heaviest goes to the rank with the fewest tokens so far.
    """
    ranks: list[list[Micro]] = [[] for _ in steps[0]]
    tokens = [0] * len(ranks)
    for step in steps:
        emptiest = sorted(range(len(ranks)), key=lambda rank: tokens[rank])
        for rank, micro in zip(emptiest, step, strict=True):
            ranks[rank].append(micro)
            tokens[rank] += load_of(micro, lengths)
    return ranks


def _filled(
    order: Sequence[int], lengths: Sequence[int], count: int, ranks: int, budget: int
) -> list[Step] | None:
    """Fill `count` steps; None where they do not hold all samples. order: longest first."""
    steps: list[Step] = []
    left, tokens = list(order), sum(lengths[index] for index in order)
    for remaining in range(count, 0, -1):
        height = budget
        if remaining > 1:
            height = min(budget, max(lengths[left[0]], -(-tokens // (ranks * remaining))))
        # later steps want a sample for every rank
        most = max(0, len(left) - ranks * remaining)
        step, left = _fill_one(left, lengths, ranks, height, most)
        tokens -= sum(lengths[index] for micro in step for index in micro)
        steps.append(step)
    return None if left else sorted(steps, key=lambda step: -load_of(step[0], lengths))


def _fill_one(
    order: Sequence[int], lengths: Sequence[int], ranks: int, height: int, most: int
) -> tuple[Step, list[int]]:
    """Fill one step; return it and the samples that are left, longest first.

    Each rank gets one of the longest samples, if there are as many; of the others the longest that
    fits goes to the lightest rank, until none fits below `height` or `most` have been taken.
    """
    step = [[index] for index in order[:ranks]]
    loads = [(lengths[index], rank) for rank, index in enumerate(order[:ranks])]
    heapify(loads)
    rises = [-lengths[index] for index in order]
    left: list[int] = []
    place = ranks
    for _ in range(most):
        load, rank = loads[0]
        fits = bisect_left(rises, load - height, lo=place)
        left += order[place:fits]
        place = fits
        if fits == len(order):
            break
        step[rank].append(order[fits])
        heapreplace(loads, (load + lengths[order[fits]], rank))
        place += 1
    left += order[place:]
    step.sort(key=lambda micro: (-load_of(micro, lengths), micro[0]))
    return step + [[]] * (ranks - len(step)), left


def load_of(micro: Micro, lengths: Sequence[int]) -> int:
    """Return the tokens of a micro-batch."""
    return sum(lengths[index] for index in micro)
