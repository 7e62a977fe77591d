"""Describes what was chosen to be trained on: groups, lengths, weights, a curriculum."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

SELECTION = {
    "reward_sampled_mean": Metric(
        "",
        "Mean reward of all responses scored since the row before, also those of dropped groups.",
        action="this one, not reward_mean, says how good the student is where selection.groups "
        "drops groups",
    ),
    "groups_all_right": Metric(
        "groups",
        "Groups dropped since the run began because every reward was 1 (selection.groups).",
        action="grows faster than what is trained on: prompts are too easy; see data.curriculum",
    ),
    "groups_all_wrong": Metric(
        "groups",
        "Groups dropped since the run began because every reward was 0 (selection.groups).",
        action="grows faster than what is trained on: prompts are too hard, or the verifier "
        "misreads",
    ),
    "groups_no_reward_spread": Metric(
        "groups",
        "Groups dropped since the run began whose rewards were alike, and neither 0 nor 1.",
    ),
    "overlong_penalty_mean": Metric(
        "",
        "Mean of what length took from the reward (selection.overlong soft_penalty); 0 or less.",
        action="falls: responses come near their limit; see length_stops",
    ),
    "masked_samples": Metric(
        "samples",
        "Responses of the batch that were cut and carry no loss (selection.overlong mask).",
        action="most of num_samples: little is learnt; raise rollout.max_new_tokens",
    ),
    "curriculum_skipped": Metric(
        "prompts", "Prompts passed over since the run began for their pass rate (data.curriculum)."
    ),
    "curriculum_rated_fraction": Metric(
        "share", "Share of the training prompts that have a pass rate."
    ),
    "curriculum_in_band_fraction": Metric(
        "share",
        "Share of the rated prompts whose pass rate is in [low, high].",
        healthy=Range(0.2, None),
        action="low: nearly all prompts are too easy or too hard; widen the band or change data",
    ),
}
