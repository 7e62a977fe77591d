"""Takes from a learner rank the slices that it writes, and finds what of them has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from megatron_opd.models.views import View
from megatron_opd.weight_sync.disk_files import Content, StoredNumbers
from megatron_opd.weight_sync.holdings import Held
from megatron_opd.weight_sync.shards_sender import cut
from sglang_bridge.weights.changes import Changes, find_changes
from sglang_bridge.weights.exchange import Read
from sglang_bridge.weights.formats import EXACT
from sglang_bridge.weights.message_order import SlicePart


class Slices:
    """Holds what this rank writes. views: its live weights, by name. dtype: the servers'.

    remembers: keeps the numbers of the last version, which take the bytes of one version's file of
    this rank, so that `changes` can be told.
    """

    def __init__(
        self,
        held: Sequence[Held],
        views: Mapping[str, Sequence[View]],
        dtype: torch.dtype,
        *,
        remembers: bool,
    ) -> None:
        self._held, self._dtype, self._remembers = held, dtype, remembers
        self._parts = Counter(part.name for part in held)
        self._views = {self._name(part): cut(_part(part), views[part.name]) for part in held}
        self._last: dict[str, torch.Tensor] = {}

    def whole(self, read: Read) -> list[Content]:
        """List all slices. read: what to write in place of a view."""
        return [self._whole(held, read) for held in self._held]

    def changes(self, read: Read) -> list[Content]:
        """List what has changed since the last version, and remember what is now."""
        return [self._changed(held, read) for held in self._held]

    def _whole(self, held: Held, read: Read) -> Content:
        if self._remembers:
            now = self._numbers(held, read)
            self._last[self._name(held)] = last = now.clone()
            return self._content(held, last)
        shape = (held.length, *(size for dim, size in enumerate(held.shape) if dim != held.dim))
        made = StoredNumbers(
            self._name(held), self._dtype_of(held), shape, lambda: self._numbers(held, read)
        )
        return Content(held.name, held.dim, held.start, held.length, held.shape, "whole", (made,))

    def _changed(self, held: Held, read: Read) -> Content:
        now, last = self._numbers(held, read), self._last[self._name(held)]
        found = find_changes(last, now)
        last.copy_(now)
        return self._content(held, last, found) if found is not None else self._content(held, last)

    def _content(self, held: Held, whole: torch.Tensor, changes: Changes | None = None) -> Content:
        where = (held.name, held.dim, held.start, held.length, held.shape)
        if changes is None:
            return Content(*where, "whole", (_there(self._name(held), whole),))
        if not len(changes.values):
            return Content(*where, "same", ())
        numbers = (
            _there(f"{self._name(held)}#counts", changes.counts),
            _there(f"{self._name(held)}#offsets", changes.offsets),
            _there(f"{self._name(held)}#values", changes.values),
        )
        return Content(*where, "changes", numbers)

    @torch.no_grad()
    def _numbers(self, held: Held, read: Read) -> torch.Tensor:
        """Return a slice as it is written: dimension of the cut first, in one piece on the host.

        It may be the live memory itself.
        """
        parts = [
            read(view.name, view.tensor).to(self._dtype_of(held)).movedim(held.dim, 0)
            for view in self._views[self._name(held)]
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().contiguous()

    def _name(self, held: Held) -> str:
        """Return the name of a slice in this rank's file, which may hold several of a tensor."""
        return held.name if self._parts[held.name] == 1 else f"{held.name}[{held.start}:]"

    def _dtype_of(self, held: Held) -> torch.dtype:
        return torch.float32 if held.kind == EXACT else self._dtype


def _there(key: str, tensor: torch.Tensor) -> StoredNumbers:
    return StoredNumbers(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def _part(held: Held) -> SlicePart:
    return SlicePart(held.name, held.dim, held.start, held.length, held.elements)
