"""Lets the student guess a number in several turns, without tools."""

from __future__ import annotations

import random
import re

from megatron_opd.environments.calls import Reply
from megatron_opd.environments.protocol import EnvironmentRow, Messages, TrajectoryEnd

_NUMBER = re.compile(r"-?\d{1,18}")


class GuessEnvironment:
    """Chooses a whole number in [low, high], and says of each guess whether it is too low.

    The reward is 1 for the number, 0 once all guesses are used up. It is the row's answer where
    that is a whole number; else the trajectory's seed chooses it.
    """

    def __init__(self, *, low: int = 1, high: int = 100, guesses: int = 8) -> None:
        if low > high or guesses < 1:
            raise ValueError(f"low must be <= high and guesses >= 1, got {low}, {high}, {guesses}")
        self._low, self._high, self._left = low, high, guesses
        self._number = low

    async def start(self, row: EnvironmentRow) -> Messages:
        """Return what is asked for."""
        given = row.answer if isinstance(row.answer, str) else ""
        drawn = random.Random(row.seed).randint(self._low, self._high)
        self._number = int(given) if _NUMBER.fullmatch(given.strip()) else drawn
        return (
            f"I think of a whole number from {self._low} to {self._high}. "
            f"Guess it: you have {self._left} guesses."
        )

    async def step(self, reply: Reply) -> Messages | TrajectoryEnd:
        """Return whether the last number of the text is too low; the end if it is right."""
        guesses = _NUMBER.findall(reply.text)
        if guesses and int(guesses[-1]) == self._number:
            return TrajectoryEnd(1.0)
        self._left -= 1
        if not self._left:
            return TrajectoryEnd(0.0)
        if not guesses:
            return "Say a whole number."
        return "Too low." if int(guesses[-1]) < self._number else "Too high."
