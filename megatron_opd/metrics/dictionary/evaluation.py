"""Describes a row of evaluations.jsonl: one evaluated set at one version."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric

EVALUATION = (
    Metric("set", "eval", "", "Name of the held-out set (data.heldout)."),
    Metric("version_min", "eval", "", "Oldest version that sampled one of the answers."),
    Metric("version_max", "eval", "", "Newest version that sampled one of the answers."),
    Metric(
        *("lag_steps", "eval", "updates"),
        "Updates that the learner had made by the end, since those that are evaluated.",
        action="large: the figures are of an older student; evaluate fewer problems, or on servers "
        "of their own",
    ),
    Metric(
        *("accuracy_pct", "eval", "%"),
        "Share of answers that the verifier accepts, mean over problems and samples (avg@k).",
        action="falls while reverse_kl_nats falls too: the teacher is no better on this set",
    ),
    Metric(
        *("stderr_pct", "eval", "percentage points"),
        "Standard error of accuracy_pct over problems; differences below twice of it say little, "
        "unless the same problems were drawn by the same seeds, as those of a run are.",
    ),
    Metric(
        *("pass_at_k", "eval", "%"),
        "Estimated chance of at least one accepted answer among k (unbiased), by k.",
    ),
    Metric(
        *("pass_at_k_stderr_pct", "eval", "percentage points"),
        "Standard error of pass_at_k over problems, by k.",
    ),
    Metric(*("mean_reward", "eval", ""), "Mean reward of the answers; accepted is 1."),
    Metric(
        *("verifier_failures", "eval", "samples"),
        "Answers that no verifier could judge, which count as wrong, by the reason.",
    ),
    Metric("problems", "eval", "problems", "Problems of the set."),
    Metric("samples", "eval", "samples", "Answers to each problem."),
    Metric("mean_response_tokens", "eval", "tokens", "Mean length of the answers."),
    Metric(
        *("truncated_pct", "eval", "%"),
        "Share of answers that ended at the limit of tokens.",
        action="high: accuracy_pct is a lower bound; allow longer answers",
    ),
    Metric("seconds", "eval", "s", "Time from the first prompt to the last verdict."),
)
