"""Describes trajectories of several turns; only runs with an environment have these columns."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

TURNS = {
    "turns_mean": Metric(
        "turns",
        "Mean number of the student's turns in a trajectory of the batch.",
        action="at environment.max_turns: see length_stops; raise it, or the student does not end",
    ),
    "sequences_mean": Metric(
        "sequences",
        "Mean number of sequences of a trajectory; above 1 where a history was rewritten.",
        action="high: environment.history: append trains on fewer given tokens",
    ),
    "given_tokens_mean": Metric(
        "tokens",
        "Mean number of tokens of a trajectory that were given: the prompt, what the environment "
        "said, replayed history.",
    ),
    "turn_sampling_s_mean": Metric(
        "s",
        "Mean time in which the turns of a trajectory were sampled, waiting for a slot and a "
        "server included.",
    ),
    "environment_s_mean": Metric(
        "s",
        "Mean time in which the environment answered the turns of a trajectory.",
        action="above turn_sampling_s_mean: tools are the bottleneck; make them faster, or raise "
        "schedule.max_staleness so that more trajectories are under way",
    ),
    "tool_calls_mean": Metric("calls", "Mean number of tool calls in a trajectory."),
    "tool_call_error_fraction": Metric(
        "share",
        "Share of tool calls that could not be made: no JSON, no such tool, wrong arguments; null "
        "without calls.",
        healthy=Range(0, 0.5),
        action="high: environment.tool_format is not the student's, or it has not learnt the "
        "format yet; fine-tune it on conversations with calls",
    ),
    "turn_cached_fraction": Metric(
        "share",
        "Share of the tokens before second and later turns whose keys and values the server had; "
        "null without such turns.",
        healthy=Range(low=0.9),
        action="low: every weight sync empties the cache; fewer syncs (schedule.sync_every), or a "
        "larger student.max_total_tokens where the cache is evicted",
    ),
}
