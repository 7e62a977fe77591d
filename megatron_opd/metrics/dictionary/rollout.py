"""Describes the samples of a batch: lengths, rewards, age, cache, drops."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

IN_SYNCS = "verl counts in weight syncs, this in updates"

ROLLOUT = (
    Metric(
        *("response_tokens_mean", "rollout", "tokens"),
        "Mean length of the responses of the batch.",
        action="rises to rollout.max_new_tokens: see length_stops",
        aliases={"slime": "rollout/response_len/mean", "verl": "response_length/mean"},
    ),
    Metric(
        *("length_stops", "rollout", "samples"),
        "Responses of the batch that ended at rollout.max_new_tokens.",
        action="a growing share of num_samples: raise rollout.max_new_tokens, or look at what the "
        "student repeats",
    ),
    Metric(
        *("stop_string_stops", "rollout", "samples"),
        "Responses of the batch that ended at a stop string (rollout.stop, data.stop_key).",
    ),
    Metric(
        *("reward_mean", "rollout", ""),
        "Mean reward of the batch's responses, by the verifier (data.task).",
        action="flat at 0 or 1: the prompts are too hard or too easy, or the verifier misreads",
        aliases={"slime": "rollout/raw_reward", "verl": "critic/score/mean"},
    ),
    Metric(
        *("reward_group_std_mean", "rollout", ""),
        "Deviation of the rewards inside a group, mean over groups; null without groups.",
        action="falls towards 0: groups agree, so they teach nothing; see the next column",
    ),
    Metric(
        *("reward_uniform_group_fraction", "rollout", "share"),
        "Share of groups whose rewards are all equal; they have advantages of 0.",
        healthy=Range(0, 0.5),
        action="high: prompts of medium difficulty, or a larger rollout.group_size",
    ),
    Metric(
        *("staleness_mean_versions", "rollout", "versions"),
        "Mean age of the tokens trained on: the learner's version minus the one that sampled them.",
        action="near schedule.max_staleness in every update: rollouts wait for the learner, and a "
        "lower bound costs no speed",
    ),
    Metric(
        *("staleness_max_versions", "rollout", "versions"),
        "Largest age of a token; never above the bound of the schedule.",
    ),
    Metric(
        *("partial_rollouts", "rollout", "samples"),
        "Responses of the batch that more than one version sampled.",
    ),
    Metric(
        *("distinct_ids_per_token", "rollout", "ids"),
        "Ids that the support selected (weight above 0), per response token.",
        action="falls towards 1: the student is sure of nearly everything; a smaller support would "
        "do",
    ),
    Metric(
        *("cache_bytes_per_token", "rollout", "bytes"),
        "Size of the draw cache as the controller holds it, per response token.",
    ),
    Metric(
        *("dropped_samples", "rollout", "samples"),
        "Samples dropped since the run began, for any reason (samples_dropped of summary.json "
        "counts them by reason).",
        action="grows: the first drop of each reason is on the terminal; timeouts: raise "
        "teacher.request_timeout_s or add servers",
    ),
    Metric(
        *("window_stale_samples", "rollout", "samples"),
        "Responses of the window's updates with a token older than the live version.",
    ),
    Metric(
        *("window_stale_prompts", "rollout", "prompts"),
        "Prompts of the window's updates with such a response.",
    ),
    Metric(
        *("window_partial_samples", "rollout", "samples"),
        "Responses of the window's updates that several versions sampled.",
        aliases={"verl": "fully_async/partial/total_partial_num"},
    ),
    Metric(
        *("window_partial_ratio", "rollout", "share"),
        "Share of such responses.",
        aliases={
            "slime": "rollout/weight_version/mixed_version_ratio",
            "verl": "fully_async/partial/partial_ratio",
        },
    ),
    Metric(
        *("window_partial_span_max", "rollout", "versions"),
        "Largest difference between two versions of one response.",
        aliases={"verl": "fully_async/partial/max_partial_span"},
        differs=IN_SYNCS,
    ),
)
