"""Describes how far the learner's probabilities are from the sampler's: mismatch and staleness."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

EVERY_TOKEN = "verl measures all tokens of a batch, stale ones too"

MISMATCH = {
    "probs_diff_max": Metric(
        "",
        "Largest |p_learner - p_sampler| of the path tokens that the batch's own version sampled; "
        "null when there were none.",
        action="see probs_diff_mean; a single large one is common with bfloat16",
        aliases={"verl": "training/rollout_probs_diff_max"},
        differs=EVERY_TOKEN,
    ),
    "probs_diff_mean": Metric(
        "",
        "Mean |p_learner - p_sampler| over the same tokens: what the two engines compute "
        "differently with equal weights. About 1e-7 in float32 and 1e-2 in bfloat16.",
        healthy=Range(0, 0.02),
        action="rises during a run: opd mismatch says where from; with MoE set "
        "learner.routing_replay, else student.dtype float32 or a correction",
        aliases={"verl": "training/rollout_probs_diff_mean"},
        differs=EVERY_TOKEN,
    ),
    "mismatch_tokens": Metric("tokens", "Tokens that probs_diff_max and _mean measured."),
    "mismatch_k3_nats": Metric(
        "nats a token",
        "Estimate of KL(sampler || learner) over the same tokens: the mean of r - 1 - log r, "
        "r = p_learner / p_sampler, of which at most 10 counts; null when there were none.",
        healthy=Range(0, 0.05),
        action="large in the first update: learner and servers hold different models "
        "(learner.mismatch_limit); else see probs_diff_mean",
    ),
    "probs_diff_free_max": Metric(
        "",
        "probs_diff_max with the learner's own routing in place of the replayed one "
        "(learner.routing_compare_every).",
    ),
    "probs_diff_free_mean": Metric(
        "",
        "probs_diff_mean with the learner's own routing; above probs_diff_mean by what routing "
        "replay saves.",
    ),
    "routing_moved_fraction": Metric(
        "share",
        "Share of the replayed (position, layer) pairs whose router would have chosen other "
        "experts.",
        healthy=Range(0, 0.2),
        action="rises: sampler and learner drift apart; look at probs_diff_free_mean",
    ),
    "ratio_p50": Metric(
        "",
        "Median importance ratio, learner over sampler, of the cached ids.",
        healthy=Range(0.9, 1.1),
        action="see ratio_p99",
    ),
    "ratio_p99": Metric(
        "",
        "99th percentile of the importance ratio.",
        healthy=Range(1, 2),
        action="rises: data is too old for the learning rate; lower schedule.max_staleness or "
        "learner.optimizer.lr",
    ),
    "ratio_max": Metric(
        "",
        "Largest importance ratio: one id of one token. Tens to hundreds are normal; "
        "docs/metrics.md says why.",
        action="see ratio_p99; support.type atoms_tail or correction.type truncated bound it",
    ),
    "sampler_k1_nats": Metric(
        "nats a token",
        "Estimate of KL(sampler || student), with a sign: staleness and mismatch together.",
        action="rises: lower schedule.max_staleness; still there at staleness 0: opd mismatch",
    ),
    "sampler_k2_nats": Metric(
        "nats a token", "The same by half the mean squared log ratio; never below 0, biased."
    ),
    "sampler_k3_nats": Metric(
        "nats a token",
        "The same by the mean of r - 1 - log r; never below 0, unbiased.",
        healthy=Range(0, 0.05),
        action="see sampler_k1_nats",
    ),
    "sampler_start_k1_nats": Metric(
        "nats a token",
        "Estimate of KL(sampler || batch's start), with a sign; only with correction.prox or "
        "learner.score_start.",
        aliases={"verl": "rollout_corr/kl"},
    ),
    "sampler_start_k3_nats": Metric(
        "nats a token",
        "The same by the mean of r - 1 - log r.",
        healthy=Range(0, 0.05),
        action="see sampler_k1_nats",
        aliases={"verl": "rollout_corr/k3_kl"},
    ),
}
