"""Measures the turns of a batch's trajectories: how many, what their environments did, the cache.

A batch of single turns has no columns of this kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_opd.metrics.intervals import Interval
from megatron_opd.records.branches import BRANCHES
from megatron_opd.records.turn_rewards import turn_rewards
from megatron_opd.records.types import AnyRollout, AnySample


def sampling_times(rollout: AnyRollout) -> list[Interval]:
    """Return from when to when servers worked on a rollout, rising.

    Without an environment that is all of its time; else of each turn what it neither waited for a
    slot nor was answered, counted back from the end as if turns came one after another.
    """
    begun_s, end_s = rollout.started_s, rollout.finished_s
    if not rollout.turns:
        return [(begun_s, end_s)]
    found: list[Interval] = []
    for turn in reversed(rollout.turns):
        stop_s = max(begun_s, end_s - turn.environment_s)
        end_s = max(begun_s, stop_s - turn.sampling_s)  # an agent's turns may overlap
        found.append((min(stop_s, end_s + turn.waiting_s), stop_s))
    return found[::-1]


def turn_columns(rollouts: Sequence[AnyRollout]) -> dict[str, float | None]:
    """Return the columns of those that an environment answered; none where there are none.

    turn_cached_fraction: of the tokens before second and later turns, of all trajectories together,
    but for those with which an agent begins anew. branches_...: sequences that were begun besides
    the first, by what began them.
    """
    played = [each for each in rollouts if each.turns]
    if not played:
        return {}
    turns = [turn for rollout in played for turn in rollout.turns]
    calls = sum(turn.calls for turn in turns)
    before = cached = 0
    for rollout in played:
        for run in rollout.runs:
            if run.turn and rollout.turns[run.turn].branch != "new":
                before += run.start
                cached += rollout.turns[run.turn].cached
    count = len(played)
    sampled = sum(rollout.num_response_tokens for rollout in played)
    return {
        "turns_mean": len(turns) / count,
        "sequences_mean": sum(len(rollout.sizes) for rollout in played) / count,
        "given_tokens_mean": (sum(rollout.num_tokens for rollout in played) - sampled) / count,
        "turn_sampling_s_mean": sum(turn.sampling_s for turn in turns) / count,
        "turn_waiting_s_mean": sum(turn.waiting_s for turn in turns) / count,
        "environment_s_mean": sum(turn.environment_s for turn in turns) / count,
        "tool_calls_mean": calls / count,
        "tool_call_error_fraction": sum(t.call_errors for t in turns) / calls if calls else None,
        "turn_cached_fraction": cached / before if before else None,
        "settings_ignored_mean": sum(turn.ignored for turn in turns) / count,
        **{
            f"branches_{cause}_mean": sum(turn.branch == cause for turn in turns) / count
            for cause in BRANCHES
        },
    }


def credit_columns(samples: Sequence[AnySample], group_size: int) -> dict[str, float | None]:
    """Return the columns of a run with environment.credit: turn.

    turn_alone_fraction: of the turns with a reward; None where there is no group to compare with.
    """
    rewards = [
        (sample.rollout.prompt.uid // group_size, turn_rewards(sample)) for sample in samples
    ]
    turns = sum(len(own) for _, own in rewards)
    places = Counter(
        (group, position)
        for group, own in rewards
        for position, reward in enumerate(own)
        if reward is not None
    )
    rewarded = places.total()
    alone = sum(count == 1 for count in places.values())
    compared = group_size > 1 and rewarded
    return {
        "turn_rewarded_fraction": rewarded / turns,
        "turn_alone_fraction": alone / rewarded if compared else None,
    }


def turn_lengths(rollout: AnyRollout) -> list[tuple[int, int, float]]:
    """Return the tokens given before each turn, those it sampled, and the seconds of its answer.

    Given are those that come after the turn before of the same sequence. None without environment.
    """
    if not rollout.turns:
        return []
    found: list[tuple[int, int, float]] = []
    stops: dict[int, int] = {}
    for run in rollout.runs:
        turn = rollout.turns[run.turn]
        given = run.start - stops.get(run.sequence, 0)
        found.append((given, run.num_tokens, round(turn.environment_s, 6)))
        stops[run.sequence] = run.stop
    return found
