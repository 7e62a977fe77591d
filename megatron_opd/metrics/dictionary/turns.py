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
    "turn_waiting_s_mean": Metric(
        "s",
        "Mean time of that in which the turns of a trajectory waited for a slot.",
        action="most of turn_sampling_s_mean: raise rollout.concurrency, or add student servers",
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
    "turn_rewarded_fraction": Metric(
        "share",
        "Share of turns that the environment gave a reward; the others have an advantage of 0. "
        "Only with environment.credit: turn.",
        action="low: let it return Said(messages, reward), or environment.credit: trajectory",
    ),
    "turn_alone_fraction": Metric(
        "share",
        "Share of these turns at whose position no other trajectory of the prompt has a reward: "
        "nothing to compare, an advantage of 0. Null without groups, or rewards.",
        healthy=Range(0, 0.5),
        action="high: trajectories of a prompt differ much in length; a larger rollout.group_size",
    ),
    "settings_ignored_mean": Metric(
        "settings",
        "Mean number of settings of sampling in the calls of a trajectory's agent that are not the "
        "run's, such as another temperature; the run's are used.",
        action="above 0: let the agent leave them out, or set rollout.temperature and top_p so",
    ),
    "branches_new_mean": Metric(
        "sequences",
        "Mean number of sequences of a trajectory that its agent began anew, as sub-agents do.",
    ),
    "branches_edited_mean": Metric(
        "sequences",
        "Mean number of sequences of a trajectory that its agent began with an earlier answer in "
        "another history.",
        action="not meant: the agent drops or rewrites messages, or changes its tools; each time "
        "the whole history is computed anew, as given tokens",
    ),
    "branches_sibling_mean": Metric(
        "sequences",
        "Mean number of sequences of a trajectory that its agent began by asking again where an "
        "answer was given already: parallel calls, and repeats of lost ones.",
        action="not meant: raise the timeout of the agent's client, or let it not repeat calls",
    ),
    "branches_rewritten_mean": Metric(
        "sequences",
        "Mean number of sequences of a trajectory that were begun as the chat template rewrote "
        "the history (environment.history: branch).",
    ),
}
