"""Defines what plays the trajectories of a run, for whoever samples their turns."""

from __future__ import annotations

from typing import Protocol

from megatron_opd.environments.play import Played, TurnSampler
from megatron_opd.environments.protocol import EnvironmentRow


class Playing(Protocol):
    """Runs trajectories, several at once."""

    async def play(self, row: EnvironmentRow, sample: TurnSampler) -> Played:
        """Run one trajectory. EnvironmentFailed: there is none; what `sample` raises."""
        ...
