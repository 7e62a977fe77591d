"""A guessing game that takes its time, and leaves in a file how many turns it has been given.

Who watches a run from outside learns from it which trajectories have finished turns. It imports
nothing of the checks: hosts of environments load it.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from megatron_opd.environments.calls import Reply
from megatron_opd.environments.guess import GuessEnvironment
from megatron_opd.environments.protocol import EnvironmentRow, Messages, TrajectoryEnd


class RecordedGame(GuessEnvironment):
    """Plays as `guess` does. record: a directory. pause_s: the longest time of an answer.

    Each trajectory has a time of its own, by its seed, so that batches do not end all at once.
    """

    def __init__(self, *, record: str, pause_s: float, low: int, high: int, guesses: int) -> None:
        super().__init__(low=low, high=high, guesses=guesses)
        self._file, self._pause_s = Path(record) / str(os.getpid()), pause_s
        self._share, self._turns = 0.0, 0

    async def start(self, row: EnvironmentRow) -> Messages:
        """Return what is asked for."""
        self._file.write_text("0")  # there may be one of an earlier process with this number
        self._share = random.Random(row.seed).random()
        return await super().start(row)

    async def step(self, reply: Reply) -> Messages | TrajectoryEnd:
        """Return whether the last number of the text is too low; the end if it is right."""
        self._turns += 1
        self._file.write_text(str(self._turns))
        await asyncio.sleep(self._share * self._pause_s)
        said = await super().step(reply)
        if isinstance(said, TrajectoryEnd):
            self._file.unlink()
        return said


def turns_given(record: Path) -> dict[int, int]:
    """Return by process how many finished turns it was given; of some that were killed too."""
    found: dict[int, int] = {}
    for file in record.iterdir():
        try:
            found[int(file.name)] = int(file.read_text() or 0)
        except FileNotFoundError:  # it has ended
            continue
    return found
