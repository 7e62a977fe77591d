"""Says which learner rank writes what of a version, and what space versions take. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_opd.config.schema import Config
from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import Held, learner_holdings
from sglang_bridge.weights.formats import item_bytes


def writers(learner: Iterable[Held]) -> Iterator[tuple[int, Held]]:
    """Yield (rank that writes it, slice) for all that a learner's ranks hold.

    Of ranks that hold the same slice one writes it; they take turns over slices of the same size.
    """
    turns: Counter[tuple[tuple[int, ...], int]] = Counter()
    for held in learner:
        turn = turns[held.ranks, held.elements]
        turns[held.ranks, held.elements] += 1
        yield held.ranks[turn % len(held.ranks)], held


@dataclass(frozen=True, slots=True)
class DiskSizes:
    """Holds the bytes of a run's versions. whole: of one. written: the busiest learner rank's.

    wholes: whole versions that are there at once, at most. changes: versions of changes besides.
    """

    whole: int
    written: int
    wholes: int
    changes: int

    @property
    def space(self) -> int:
        """Returns the bytes of the whole versions that are there at once."""
        return self.whole * self.wholes


def disk_sizes(config: Config, spec: ModelSpec) -> DiskSizes:
    """Compute what versions of type disk take."""
    learner, settings = config.learner, config.weight_sync
    sizes, written = item_bytes(config.student.dtype), Counter[int]()
    for rank, held in writers(learner_holdings(spec, learner.parallel, learner.megatron)):
        written[rank] += held.elements * sizes[held.kind]
    wholes, changes = versions_at_once(settings)
    return DiskSizes(written.total(), max(written.values()), wholes, changes)


def versions_at_once(settings: WeightSyncConfig) -> tuple[int, int]:
    """Return how many whole versions, and versions of changes, are there at once, at most.

    Servers that are behind keep more of them.
    """
    there = settings.keep_versions + 1
    if not settings.delta:
        return there, 0
    # from the whole one that the oldest kept may be based on
    there += settings.full_every - 1
    wholes = 1 + (there - 1) // settings.full_every
    return wholes, there - wholes
