"""Gives out samples in the order in which they were finished, as far as no deadline is missed.

A unit is a group of samples that are trained on together, numbered uid // G; it is due by the
update v + A, v being the version under which its first member was admitted. docs/staleness.md has
the rule and its proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_opd.buffer.buffer import SampleBuffer
from megatron_opd.records.types import AnySample

NO_DEADLINE = 1 << 62
"""As max_age: samples are given out in the order in which they were finished alone."""


class CompletionBuffer(SampleBuffer):
    """Holds samples, and chooses those of the next batch.

    Args:
        batch_size: B.
        group_size: G, divides B.
        max_age: A, in updates.
        updates: batches that were taken before.
    """

    def __init__(self, batch_size: int, group_size: int, max_age: int, updates: int = 0) -> None:
        super().__init__()
        self._batch_size, self._group_size, self._max_age = batch_size, group_size, max_age
        self._updates = updates
        self._units: dict[int, _Unit] = {}
        self._finished: dict[int, None] = {}  # complete units, in order of their completion
        self._taken: dict[int, _Unit] = {}  # units of the last batch
        self._left: Counter[int] = Counter()  # samples not trained on or dropped, by deadline

    @property
    def ready(self) -> int:
        """Returns how many samples can be taken now: none while some due ones are unfinished."""
        finished = len(self._finished) * self._group_size
        if finished < self._batch_size or self.exhausted:
            return finished
        return finished if self._is_enough() else 0

    @property
    def scored(self) -> int:
        """Returns the number of scored samples held."""
        return len(self._line) - self.waiting_for_score

    @property
    def exhausted(self) -> bool:
        """Returns whether the buffer is closed and no prompt is unscored: `ready` cannot grow."""
        return self._closed and self.waiting_for_score == 0

    def admit(self, uid: int, version: int) -> None:
        """Append a prompt, admitted while `version` is live."""
        super().admit(uid, version)
        number, due = uid // self._group_size, version + self._max_age
        unit = self._units.get(number)
        if unit is not None and unit.due <= due:
            return
        if unit is None:
            unit = self._units[number] = _Unit(due)
        else:  # in a resumed run the first member may be the one that is sampled anew
            self._give_back(unit.due)
            unit.due = due
        self._left[due] += self._group_size

    def drop(self, uid: int) -> None:
        """Remove a prompt that will have no sample, and its unit with it."""
        self._end(uid // self._group_size)
        super().drop(uid)

    def withdraw(self, uids: Collection[int]) -> list[int]:
        """Remove the scored samples among `uids`; returns the removed uids."""
        gone = [uid for uid in uids if self._line.get(uid) is not None]
        for uid in gone:
            self._end(uid // self._group_size)
            del self._line[uid]
        self._changed_now()
        return gone

    def reopen(self, uid: int) -> AnySample | None:
        """Make a scored prompt wait for a sample again; its unit is not finished any more."""
        found, unit = super().reopen(uid), self._units.get(uid // self._group_size)
        if found is not None and unit is not None:
            unit.uids.remove(uid)
            self._finished.pop(uid // self._group_size, None)
        return found

    def put_back(self, samples: Sequence[AnySample]) -> None:
        """Take back what the last `take` gave; its units are finished, as before."""
        self._updates -= 1
        for number, unit in self._taken.items():
            self._units[number] = unit
            self._left[unit.due] += self._group_size
        self._finished = dict.fromkeys(self._taken) | self._finished
        super().put_back(samples)

    def take(self, count: int) -> tuple[AnySample, ...]:
        """Remove and return the samples of the next batch; ValueError: `count` cannot be had."""
        if count > self.ready:
            raise ValueError(f"{count} samples were asked for, {self.ready} are ready")
        chosen = self._chosen(count // self._group_size)
        samples: list[AnySample] = []
        self._taken = {number: self._units[number] for number in chosen}
        for number in chosen:
            samples += map(self._pop, self._units[number].uids)
            self._end(number)
        self._updates += 1
        return tuple(samples)

    def _store(self, uid: int, sample: AnySample) -> None:
        self._line[uid] = sample
        unit = self._units.get(uid // self._group_size)
        if unit is None:  # another member was dropped; it will be withdrawn
            return
        unit.uids.append(uid)
        if len(unit.uids) == self._group_size:
            unit.uids.sort()
            self._finished[uid // self._group_size] = None

    def _advance(self) -> None:
        self._changed_now()

    def _is_enough(self) -> bool:
        """Return whether the finished units hold all that must be in the next batch."""
        there: Counter[int] = Counter()
        for number in self._finished:
            there[self._units[number].due] += self._group_size
        return all(
            sum(count for other, count in there.items() if other <= due) >= must
            for due, must in self._musts()
        )

    def _chosen(self, count: int) -> list[int]:
        """Return the units of the next batch: the first finished, but all that must be in it."""
        chosen: set[int] = set()
        for due, must in self._musts():
            among = [n for n in self._finished if self._units[n].due <= due]
            later = [n for n in among if n not in chosen]
            missing = -(-must // self._group_size) - (len(among) - len(later))
            chosen.update(later[: max(0, missing)])
        others = [n for n in self._finished if n not in chosen]
        chosen.update(others[: count - len(chosen)])
        return [n for n in self._finished if n in chosen]

    def _musts(self) -> Iterator[tuple[int, int]]:
        """Yield (deadline D, how many samples due by D must be in the next batch), D rising.

        The later updates up to D, D - k of them, hold the rest.
        """
        total = 0
        for due in sorted(self._left):
            total += self._left[due]
            must = total - (due - self._updates) * self._batch_size
            if must > 0:
                yield due, must

    def _pop(self, uid: int) -> AnySample:
        sample = self._line.pop(uid)
        assert sample is not None
        return sample

    def _end(self, number: int) -> None:
        """Forget a unit that is trained on, or that lost a member."""
        unit = self._units.pop(number, None)
        if unit is None:
            return
        self._finished.pop(number, None)
        self._give_back(unit.due)

    def _give_back(self, due: int) -> None:
        self._left[due] -= self._group_size
        if not self._left[due]:
            del self._left[due]


@dataclass(slots=True)
class _Unit:
    """Holds when a unit is due, and which of its members are scored."""

    due: int
    uids: list[int] = field(default_factory=list[int])
