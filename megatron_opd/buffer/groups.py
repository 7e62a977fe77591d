"""Drops a group as a whole: when one member is dropped, the others are dropped with it.

The group of a prompt is uid // size; its members are admitted one after another. Size 1 is a run in
which no two samples depend on each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megatron_opd.buffer.rejection import SampleRejected
from megatron_opd.records.drops import GROUP_INCOMPLETE


class GroupIncomplete(SampleRejected):
    """Reports that another member of the sample's group was dropped."""

    def __init__(self, uid: int) -> None:
        super().__init__(GROUP_INCOMPLETE, f"sample {uid} lost a member of its group")


class SampleGroups:
    """Tracks which groups are broken, and which are scored in full.

    Args:
        size: G, samples of a group.
        broken, scored: groups broken before, and members scored of those that wait for more.
    """

    def __init__(
        self, size: int, broken: Iterable[int] = (), scored: Mapping[int, int] | None = None
    ) -> None:
        self._size = size
        self._broken: set[int] = set(broken)
        self._scored: Counter[int] = Counter(scored or {})

    @property
    def state(self) -> tuple[list[int], dict[int, int]]:
        """Return the `broken` and `scored` arguments of a SampleGroups that continues from here."""
        return sorted(self._broken), dict(self._scored)

    def broken(self, uid: int) -> bool:
        """Return whether the sample can only be dropped."""
        return uid // self._size in self._broken

    def check(self, uid: int) -> None:
        """Raise GroupIncomplete for a sample that can only be dropped."""
        if self.broken(uid):
            raise GroupIncomplete(uid)

    def is_last(self, uid: int) -> bool:
        """Return whether a member is the last one that its group waits for."""
        return self._scored[uid // self._size] == self._size - 1

    def complete(self, uid: int) -> None:
        """Count a scored member, and forget its group with the last one."""
        group = uid // self._size
        self._scored[group] += 1
        if self._scored[group] == self._size:
            del self._scored[group]

    def break_up(self, uid: int) -> range:
        """Mark the group of a dropped member as broken. Returns the uids of all its members."""
        group = uid // self._size
        self._broken.add(group)
        self._scored.pop(group, None)
        return range(group * self._size, (group + 1) * self._size)
