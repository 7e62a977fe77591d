"""Describes a row of evaluations.jsonl: one evaluated set at one version."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric

EVALUATION = {
    "set": Metric("", "Name of the held-out set (data.heldout)."),
    "version_min": Metric("", "Oldest version that sampled one of the answers."),
    "version_max": Metric("", "Newest version that sampled one of the answers."),
    "lag_steps": Metric(
        "updates",
        "Updates that the learner had made by the end, since those that are evaluated.",
        action="large: the figures are of an older student; evaluate fewer problems, or on servers "
        "of their own",
    ),
    "accuracy_pct": Metric(
        "%",
        "Share of answers that the verifier or the environment accepts, mean over problems and "
        "samples (avg@k).",
        action="falls while reverse_kl_nats falls too: the teacher is no better on this set",
    ),
    "stderr_pct": Metric(
        "percentage points",
        "Standard error of accuracy_pct over problems; differences below twice of it say little, "
        "unless the same problems were drawn by the same seeds, as those of a run are.",
    ),
    "pass_at_k": Metric(
        "%", "Estimated chance of at least one accepted answer among k (unbiased), by k."
    ),
    "pass_at_k_stderr_pct": Metric(
        "percentage points", "Standard error of pass_at_k over problems, by k."
    ),
    "mean_reward": Metric(
        "",
        "Mean reward of the answers; accepted is 1, with an environment 1 or more.",
    ),
    "verifier_failures": Metric(
        "samples",
        "Answers that have no judgement, as their verifier or their environment failed; they count "
        "as wrong, by the reason.",
    ),
    "problems": Metric("problems", "Problems of the set."),
    "samples": Metric("samples", "Answers to each problem."),
    "mean_response_tokens": Metric("tokens", "Mean length of the answers: sampled, of all turns."),
    "mean_turns": Metric("turns", "Mean number of the student's turns in an answer."),
    "mean_tool_calls": Metric("calls", "Mean number of tool calls in an answer."),
    "mean_call_errors": Metric(
        "calls",
        "Mean number of tool calls in an answer that could not be made as they were written.",
    ),
    "truncated_pct": Metric(
        "%",
        "Share of answers that ended at the limit of tokens, or at another one of section "
        "environment.",
        action="high: accuracy_pct is a lower bound; allow longer answers",
    ),
    "seconds": Metric("s", "Time from the first prompt to the last verdict."),
}
