"""Makes a stream of prompts from the prompts of one or several sources.

Invariant: the n-th prompt of a stream depends only on the sources, the seed and n, so that a stream
resumed at a cursor continues exactly where the first one stopped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_opd.data.epochs import Epochs, Stretch
from megatron_opd.data.faults import BadRows
from megatron_opd.records.seeds import MIXTURE, derived_seed
from megatron_opd.records.types import Prompt

BLOCK = 1024
"""Prompts whose sources are drawn by one generator: finding the n-th draws n / BLOCK times."""
AHEAD = 128
"""Prompts that a source is told of before they are drawn."""


class Prompts(Protocol):
    """Gives the prompts of a source by their place."""

    def __len__(self) -> int:
        """Return how many places there are."""
        ...

    def __getitem__(self, place: int, /) -> Prompt | None:
        """Return the prompt there, None where it cannot be used."""
        ...


@dataclass(frozen=True, slots=True)
class MixedSource:
    """Holds prompts that are drawn together, epoch after epoch.

    weight: the share of the stream's prompts that are drawn from here is weight / sum of weights.
    stretches: how many of the prompts, from the first one, its epochs have; none: all. sizes: how
    many there were when the run began, and after each time that some were added; none: all.
    expect: is told which places are drawn next, in order.
    """

    name: str
    prompts: Prompts
    weight: float = 1.0
    stretches: tuple[Stretch, ...] = ()
    sizes: tuple[int, ...] = ()
    expect: Callable[[Sequence[int]], None] | None = None


class PromptSource:
    """Streams the prompts of sources, each in an order of its own, epoch after epoch.

    Every prompt is given out `group_size` times in a row: uid // group_size is its group. The
    source of a group is drawn by weight; a source that is read to its end begins its next epoch. At
    the moment at which one would begin epoch number `epochs` (from 0) the stream ends, so that no
    prompt is drawn more than `epochs` times; None: it never ends. `cursor` is the number given out
    so far, and the uid of the next one; a stream built with that cursor continues this one. With
    `shuffle` the order of epoch e of source i is a permutation seeded by (seed, e, i); without,
    every epoch is in the order of the file. `held`: what the group at `cursor` has been given,
    where it is begun: its other prompts are the same even if the sources are not. Prompts that were
    added to a source are numbered (`row`) after all that were there before.
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        *,
        seed: int,
        shuffle: bool = True,
        group_size: int = 1,
        epochs: int | None = None,
        cursor: int = 0,
        held: Prompt | None = None,
        passed: Sequence[Sequence[int]] = (),
    ) -> None:
        if not sources or not all(len(source.prompts) for source in sources):
            raise ValueError("every source of prompts needs at least one prompt, got none")
        if cursor < 0:
            raise ValueError(f"cursor must be >= 0, got {cursor}")
        if group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {group_size}")
        self._sources = tuple(sources)
        self._seed, self._shuffle = seed, shuffle
        self.group_size, self._epochs = group_size, epochs
        self._mixture = _Mixture([source.weight for source in sources], seed)
        self.cursor = cursor
        group, member = divmod(cursor, group_size)
        self._drawn = self._mixture.counts(group)
        """Groups that were drawn from each source so far."""
        whole = [(Stretch(0, 0, len(source.prompts)),) for source in sources]
        stretches = (source.stretches for source in sources)
        self._spans = [Epochs(own or all_) for own, all_ in zip(stretches, whole, strict=True)]
        self._rows = _Rows([source.sizes or (len(source.prompts),) for source in sources])
        self._orders: dict[int, tuple[int, int, npt.NDArray[np.integer[Any]]]] = {}
        self._passed = [list(own) for own in passed or ((),) * len(sources)]
        self._prompt: Prompt | None = None
        if member:
            drawn = self._draw(group)
            self._prompt = held or drawn

    @property
    def passed(self) -> list[list[int]]:
        """Returns which places were passed over, see `PromptSource`."""
        return [list(own) for own in self._passed]

    def at(self, cursor: int, held: Prompt | None = None) -> PromptSource:
        """Return a source of the same stream that continues at `cursor`; `passed` goes as far."""
        return PromptSource(
            self._sources,
            seed=self._seed,
            shuffle=self._shuffle,
            group_size=self.group_size,
            epochs=self._epochs,
            cursor=cursor,
            held=held,
            passed=self._passed,  # those that are met again do no harm
        )

    def alone(self) -> PromptSource:
        """Return a source of the same problems from its begin, each prompt given out once."""
        return PromptSource(
            self._sources,
            seed=self._seed,
            shuffle=self._shuffle,
            epochs=self._epochs,
            passed=self._passed,
        )

    def epochs_at(self, cursor: int) -> dict[str, float]:
        """Return how often each source was read when `cursor` prompts were given out."""
        drawn = zip(self._sources, self._spans, self.drawn_at(cursor), strict=True)
        return {source.name: span.read(count) for source, span, count in drawn}

    def drawn_at(self, cursor: int) -> list[int]:
        """Return how many places of each source were met when `cursor` prompts were given out."""
        groups = self._mixture.counts(-(-cursor // self.group_size))
        met = zip(groups, self._passed, strict=True)
        return [count + bisect_left(passed, count) for count, passed in met]

    def available(self, most: int) -> int:
        """Return how many prompts the whole stream has, or `most` if it has no fewer.

        Places that are passed over count.
        """
        if self._epochs is None:
            return most
        ends = [span.before(self._epochs) for span in self._spans]
        groups = self._mixture.first_beyond(ends, -(-most // self.group_size))
        return min(most, groups * self.group_size)

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        group, member = divmod(self.cursor, self.group_size)
        if member == 0:
            self._prompt = self._draw(group)
        if self._prompt is None:
            raise StopIteration
        prompt = replace(self._prompt, uid=self.cursor)
        self.cursor += 1
        return prompt

    def _draw(self, group: int) -> Prompt | None:
        """Return the next prompt of the group's source, None at the end of the stream."""
        index = self._mixture.source_of(group)
        source, passed = self._sources[index], self._passed[index]
        given = self._drawn[index]
        for _ in range(2 * len(source.prompts)):  # a whole epoch, wherever this one stands
            number = given + bisect_right(passed, given)
            epoch, position, count = self._spans[index].place(number)
            if self._epochs is not None and epoch >= self._epochs:
                return None
            order = self._order(index, epoch, count)
            if source.expect is not None:
                source.expect(order[position : position + AHEAD].tolist())
            place = int(order[position])
            prompt = source.prompts[place]
            if prompt is not None:
                self._drawn[index] += 1
                return replace(prompt, row=self._rows.of(index, place))
            insort(passed, given)
        raise BadRows(f"{source.name}: none of its {len(source.prompts)} rows can be used")

    def _order(self, index: int, epoch: int, count: int) -> npt.NDArray[np.integer[Any]]:
        held = self._orders.get(index)
        if held is None or held[:2] != (epoch, count):
            kind = np.min_scalar_type(count)  # the order of 20 million rows is 80 MB so
            if self._shuffle:
                order = np.random.default_rng((self._seed, epoch, index)).permutation(count)
            else:
                order = np.arange(count)
            held = self._orders[index] = (epoch, count, order.astype(kind))
        return held[2]


class _Rows:
    """Finds the numbers of prompts: of all sources those at the beginning, then those added."""

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        self._sizes_SG = np.array(sizes)
        added_SG = np.diff(self._sizes_SG, axis=1, prepend=0)
        ends_GS = np.cumsum(added_SG.T).reshape(added_SG.T.shape)
        self._offsets_SG = ends_GS.T - self._sizes_SG

    def of(self, index: int, place: int) -> int:
        """Return the number of the prompt of a source that is at a place of it."""
        generation = np.searchsorted(self._sizes_SG[index], place, side="right")
        return int(self._offsets_SG[index, generation]) + place


class _Mixture:
    """Draws the source of every group, each number by itself alone."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._edges = np.cumsum(np.array(weights) / np.sum(weights))
        self._seed = seed
        self._held: tuple[int, npt.NDArray[np.int64]] | None = None

    def source_of(self, group: int) -> int:
        """Return the index of the source that the group is drawn from."""
        if len(self._edges) == 1:
            return 0
        block, place = divmod(group, BLOCK)
        return int(self._block(block)[place])

    def counts(self, groups: int) -> list[int]:
        """Return how many of the first `groups` groups come from each source."""
        count = len(self._edges)
        if count == 1:
            return [groups]
        blocks, rest = divmod(groups, BLOCK)
        total = np.zeros(count, dtype=np.int64)
        for block in range(blocks):
            total += np.bincount(self._block(block), minlength=count)
        total += np.bincount(self._block(blocks)[:rest], minlength=count)
        return total.tolist()

    def first_beyond(self, ends: Sequence[int], most: int) -> int:
        """Return the first group whose source has given out ends[source], or `most`."""
        if len(ends) == 1:
            return min(ends[0], most)
        drawn = np.zeros(len(ends), dtype=np.int64)
        for block in range(-(-most // BLOCK)):
            chosen = self._block(block)
            there = [block * BLOCK + np.flatnonzero(chosen == s) for s in range(len(ends))]
            left = [end - int(count) for end, count in zip(ends, drawn, strict=True)]
            beyond = [
                int(groups[n]) for groups, n in zip(there, left, strict=True) if n < len(groups)
            ]
            if beyond:
                return min(*beyond, most)
            drawn += [len(groups) for groups in there]
        return most

    def _block(self, block: int) -> npt.NDArray[np.int64]:
        if self._held is None or self._held[0] != block:
            rng = np.random.default_rng(derived_seed(self._seed, MIXTURE, block))
            chosen = np.searchsorted(self._edges, rng.random(BLOCK), side="right")
            self._held = block, np.minimum(chosen, len(self._edges) - 1)
        return self._held[1]
