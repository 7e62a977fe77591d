"""Measures the turns of a batch's trajectories: how many, what their environments did, the cache.

A batch of single turns has no columns of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_opd.records.types import AnyRollout, Rollout


def turn_columns(rollouts: Sequence[AnyRollout]) -> dict[str, float | None]:
    """Return the columns of those that an environment answered; none where there are none.

    turn_cached_fraction: of the tokens before second and later turns, of all trajectories together.
    """
    played = [each for each in rollouts if isinstance(each, Rollout) and each.turns]
    if not played:
        return {}
    turns = [turn for rollout in played for turn in rollout.turns]
    calls = sum(turn.calls for turn in turns)
    before = cached = 0
    for rollout in played:
        for run in rollout.runs:
            if run.turn:
                before += run.start
                cached += rollout.turns[run.turn].cached
    count = len(played)
    sampled = sum(rollout.num_response_tokens for rollout in played)
    return {
        "turns_mean": len(turns) / count,
        "sequences_mean": sum(len(rollout.sequences) for rollout in played) / count,
        "given_tokens_mean": (sum(rollout.num_tokens for rollout in played) - sampled) / count,
        "turn_sampling_s_mean": sum(turn.sampling_s for turn in turns) / count,
        "environment_s_mean": sum(turn.environment_s for turn in turns) / count,
        "tool_calls_mean": calls / count,
        "tool_call_error_fraction": sum(t.call_errors for t in turns) / calls if calls else None,
        "turn_cached_fraction": cached / before if before else None,
    }
