"""Describes the samples of a batch: lengths, rewards, age, cache, drops."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

IN_SYNCS = "verl counts in weight syncs, this in updates"

ROLLOUT = {
    "response_tokens_mean": Metric(
        "tokens",
        "Mean length of the responses of the batch.",
        action="rises to rollout.max_new_tokens: see length_stops",
        aliases={"slime": "rollout/response_len/mean", "verl": "response_length/mean"},
    ),
    "length_stops": Metric(
        "samples",
        "Responses of the batch that ended at rollout.max_new_tokens.",
        action="a growing share of num_samples: raise rollout.max_new_tokens, or look at what the "
        "student repeats",
    ),
    "stop_string_stops": Metric(
        "samples",
        "Responses of the batch that ended at a stop string (rollout.stop, data.stop_key).",
    ),
    "reward_mean": Metric(
        "",
        "Mean reward of the batch's responses, by the verifier (data.task).",
        action="flat at 0 or 1: the prompts are too hard or too easy, or the verifier misreads",
        aliases={"slime": "rollout/raw_reward", "verl": "critic/score/mean"},
    ),
    "reward_group_std_mean": Metric(
        "",
        "Deviation of the rewards inside a group, mean over groups; null without groups.",
        action="falls towards 0: groups agree, so they teach nothing; see the next column",
    ),
    "reward_uniform_group_fraction": Metric(
        "share",
        "Share of groups whose rewards are all equal; they have advantages of 0.",
        healthy=Range(0, 0.5),
        action="high: prompts of medium difficulty, or a larger rollout.group_size",
    ),
    "staleness_mean_versions": Metric(
        "versions",
        "Mean age of the tokens trained on: the learner's version minus the one that sampled them.",
        action="near schedule.max_staleness in every update: rollouts wait for the learner, and a "
        "lower bound costs no speed",
    ),
    "staleness_max_versions": Metric(
        "versions", "Largest age of a token; never above the bound of the schedule."
    ),
    "partial_rollouts": Metric(
        "samples", "Responses of the batch that more than one version sampled."
    ),
    "distinct_ids_per_token": Metric(
        "ids",
        "Ids that the support selected (weight above 0), per response token.",
        action="falls towards 1: the student is sure of nearly everything; a smaller support would "
        "do",
    ),
    "cache_bytes_per_token": Metric(
        "bytes", "Size of the draw cache as the controller holds it, per response token."
    ),
    "dropped_samples": Metric(
        "samples",
        "Samples dropped since the run began, for any reason (samples_dropped of summary.json "
        "counts them by reason).",
        action="grows: the first drop of each reason is on the terminal; timeouts: raise "
        "teacher.request_timeout_s or add servers",
    ),
    "window_stale_samples": Metric(
        "samples", "Responses of the window's updates with a token older than the live version."
    ),
    "window_stale_prompts": Metric(
        "prompts", "Prompts of the window's updates with such a response."
    ),
    "window_partial_samples": Metric(
        "samples",
        "Responses of the window's updates that several versions sampled.",
        aliases={"verl": "fully_async/partial/total_partial_num"},
    ),
    "window_partial_ratio": Metric(
        "share",
        "Share of such responses.",
        aliases={
            "slime": "rollout/weight_version/mixed_version_ratio",
            "verl": "fully_async/partial/partial_ratio",
        },
    ),
    "window_partial_span_max": Metric(
        "versions",
        "Largest difference between two versions of one response.",
        aliases={"verl": "fully_async/partial/max_partial_span"},
        differs=IN_SYNCS,
    ),
}
