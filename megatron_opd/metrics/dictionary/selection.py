"""Describes what was chosen to be trained on: groups, lengths, weights, a curriculum."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

SELECTION = (
    Metric(
        *("reward_sampled_mean", "rollout", ""),
        "Mean reward of all responses scored since the row before, also those of dropped groups.",
        action="this one, not reward_mean, says how good the student is where selection.groups "
        "drops groups",
    ),
    Metric(
        *("groups_all_right", "rollout", "groups"),
        "Groups dropped since the run began because every reward was 1 (selection.groups).",
        action="grows faster than what is trained on: prompts are too easy; see data.curriculum",
    ),
    Metric(
        *("groups_all_wrong", "rollout", "groups"),
        "Groups dropped since the run began because every reward was 0 (selection.groups).",
        action="grows faster than what is trained on: prompts are too hard, or the verifier "
        "misreads",
    ),
    Metric(
        *("groups_no_reward_spread", "rollout", "groups"),
        "Groups dropped since the run began whose rewards were alike, and neither 0 nor 1.",
    ),
    Metric(
        *("overlong_penalty_mean", "rollout", ""),
        "Mean of what length took from the reward (selection.overlong soft_penalty); 0 or less.",
        action="falls: responses come near their limit; see length_stops",
    ),
    Metric(
        *("masked_samples", "rollout", "samples"),
        "Responses of the batch that were cut and carry no loss (selection.overlong mask).",
        action="most of num_samples: little is learnt; raise rollout.max_new_tokens",
    ),
    Metric(
        *("samples_without_teacher", "teacher", "samples"),
        "Responses of the batch for which no teacher was asked: masked, of teacher weight 0, or "
        "with an objective that reads none.",
    ),
    Metric(
        *("curriculum_skipped", "rollout", "prompts"),
        "Prompts passed over since the run began for their pass rate (data.curriculum).",
    ),
    Metric(
        *("curriculum_rated_fraction", "rollout", "share"),
        "Share of the training prompts that have a pass rate.",
    ),
    Metric(
        *("curriculum_in_band_fraction", "rollout", "share"),
        "Share of the rated prompts whose pass rate is in [low, high].",
        healthy=Range(0.2, None),
        action="low: nearly all prompts are too easy or too hard; widen the band or change data",
    ),
)
