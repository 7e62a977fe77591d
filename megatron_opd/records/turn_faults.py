"""Says what the figures of a trajectory's turns cannot be, for those who are told of them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_opd.records.runs import SampledRun
from megatron_opd.records.types import TurnFigures

MOST_S = 1e9
"""Longest time in seconds that a turn may name."""
MOST_REWARD = 1e30
"""Largest size of a reward, and of the sum of a trajectory's: the learner's numbers are float32."""


def is_reward(number: float) -> bool:
    """Return whether a number is finite, and one that can be learnt from."""
    return abs(number) <= MOST_REWARD


def turns_fault(
    runs: Sequence[SampledRun], turns: Sequence[TurnFigures], reward: float | None
) -> str | None:
    """Return in one line why these cannot be the turns of these runs, or None.

    reward: of the whole trajectory, the sum over its turns.
    """
    own = sorted(run.turn for run in runs)
    if own != list(range(len(turns))):
        return f"{len(turns)} turns in runs of turns {own[:20]}"
    if not all(map(_can_be, turns)):
        return "turns with figures that cannot be"
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    total = sum(rewards) if rewards else None
    if reward != total or (total is not None and not is_reward(total)):
        return f"a reward of {reward}, its turns have {total}"
    return None


def _can_be(turn: TurnFigures) -> bool:
    seconds = (turn.sampling_s, turn.waiting_s, turn.environment_s)
    return (
        all(0 <= each <= MOST_S for each in seconds)
        and 0 <= turn.call_errors <= turn.calls
        and len(turn.made) <= turn.calls
        and min(turn.cached, turn.ignored) >= 0
        and (turn.reward is None or is_reward(turn.reward))
    )
