"""Says in which epoch the n-th prompt of a source lies, and where, while its size may change.

Invariant: an epoch that has begun keeps its prompts and their order when prompts are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stretch(NamedTuple):
    """Holds how many prompts epochs have. epoch: the first; begins: prompts drawn before it."""

    epoch: int
    begins: int
    prompts: int


class Epochs:
    """Finds epochs of one source. stretches: in order, the first one of epoch 0."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = tuple(stretches)

    def place(self, drawn: int) -> tuple[int, int, int]:
        """Return the epoch of prompt number `drawn`, its place there, and how many are in it."""
        found = self._of(drawn)
        epoch, position = divmod(drawn - found.begins, found.prompts)
        return found.epoch + epoch, position, found.prompts

    def read(self, drawn: int) -> float:
        """Return how many epochs `drawn` prompts are."""
        found = self._of(drawn)
        return found.epoch + (drawn - found.begins) / found.prompts

    def before(self, epoch: int) -> int:
        """Return how many prompts are drawn before an epoch begins."""
        found = [each for each in self.stretches if each.epoch <= epoch][-1]
        return found.begins + (epoch - found.epoch) * found.prompts

    def grown(self, drawn: int, prompts: int) -> Epochs:
        """Return these epochs with `prompts` in each that begins with the next prompt or later."""
        epoch, position, _ = self.place(drawn)
        epoch += position > 0
        return self._then(Stretch(epoch, self.before(epoch), prompts))

    def changed(self, drawn: int, prompts: int) -> Epochs:
        """Return these epochs with `prompts` in the present one and all later ones.

        One that has given out as many already ends.
        """
        epoch, position, _ = self.place(drawn)
        if position < prompts:
            return self._then(Stretch(epoch, drawn - position, prompts))
        return self._then(Stretch(epoch + 1, drawn, prompts))

    def _then(self, last: Stretch) -> Epochs:
        return Epochs([*(each for each in self.stretches if each.epoch < last.epoch), last])

    def _of(self, drawn: int) -> Stretch:
        begun = [each for each in self.stretches if each.begins <= drawn]
        return begun[-1] if begun else self.stretches[0]._replace(begins=drawn)
