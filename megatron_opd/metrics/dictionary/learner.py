"""Describes what the learner reports of an update: loss, divergences, gradient, weights."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

BY_SAMPLE = "slime averages over the tokens of a response first"

LEARNER = {
    "update": Metric("", "Number of the learner update, from 0."),
    "version": Metric("", "Version of the weights that the update began with."),
    "loss": Metric(
        "",
        "Mean loss as reduced (reduction.type). Of a policy gradient it need not fall: "
        "look at reverse_kl_nats then.",
        action="not a number: the run stops; look at grad_norm and teacher_score_mean_nats before",
        aliases={"slime": "train/loss", "verl": "actor/loss"},
    ),
    "reverse_kl_nats": Metric(
        "nats a token",
        "Estimate of KL(student || teacher) from the cached ids, whatever the objective; on top-k "
        "supports of the part inside. Falls while the student learns; an estimate may be a little "
        "below 0.",
        action="rises: lower learner.optimizer.lr or schedule.max_staleness, look at ratio_p99",
        aliases={"slime": "rollout/opd_reverse_kl"},
        differs=f"slime's is of sampled tokens alone; {BY_SAMPLE}",
    ),
    "forward_kl_nats": Metric(
        "nats a token",
        "Estimate of KL(teacher || student) from the cached ids, whatever the objective. High "
        "beside a low reverse_kl_nats: the student leaves out what the teacher would also say.",
        action="rises while reverse_kl_nats falls: use objective.type jsd or forward_kl",
    ),
    "entropy_nats": Metric(
        "nats a token",
        "Entropy of the student's distribution, mean over response tokens.",
        action="falls towards 0 early: the student collapses; lower learner.optimizer.lr, or use "
        "an objective with forward KL",
        aliases={"slime": "train/entropy_loss", "verl": "actor/entropy"},
        differs=BY_SAMPLE,
    ),
    "balancing_loss": Metric(
        "",
        "Balancing loss of the MoE routers, unweighed, mean over layers and micro-batches; 1 when "
        "every expert gets the same share.",
        healthy=Range(1, 2),
        action="rises: experts starve; raise moe_aux_loss_coeff in learner.megatron",
    ),
    "grad_norm": Metric(
        "",
        "Norm of the whole gradient before clipping, of the last mini-batch.",
        action="exactly 0: see without_signal; many times learner.optimizer.clip_grad in every "
        "update: lower learner.optimizer.lr",
        aliases={"slime": "train/grad_norm", "verl": "actor/grad_norm"},
        differs="both average over mini-batches",
    ),
    "lr": Metric(
        "", "Learning rate of the update.", aliases={"slime": "train/lr-pg_0", "verl": "actor/lr"}
    ),
    "num_response_tokens": Metric("tokens", "Response tokens that were trained on."),
    "num_ids": Metric("ids", "Cached ids that were trained on, over all tokens."),
    "num_samples": Metric("samples", "Samples that were trained on."),
    "first_uid": Metric("", "Smallest number of a sample of the batch."),
    "last_uid": Metric("", "Largest number of a sample of the batch; batches do not overlap."),
    "without_signal": Metric(
        "0 or 1",
        "Whether the update taught nothing: equal rewards in every group, or a gradient of exactly "
        "0.",
        healthy=Range(0, 0),
        action="often 1: easier or harder prompts, a larger rollout.group_size; the terminal says "
        "which of its causes it was",
    ),
    "excluded_ids": Metric(
        "ids",
        "Cached ids that the teacher gives probability 0; they are left out of the loss.",
        healthy=Range(0, 0),
        action="above 0: the teacher's server masks ids; look at teacher.extra_args",
    ),
    "importance_mean": Metric(
        "",
        "Mean of the applied importance weights: correction times trust ratio; of responses for "
        "gspo and gepo. 1 on policy.",
        healthy=Range(0.8, 1.25),
        action="far from 1: lower schedule.max_staleness or learner.optimizer.lr",
    ),
    "importance_variance": Metric(
        "",
        "Variance of the applied importance weights; 0 on policy.",
        action="rises: lower correction.max_ratio or schedule.max_staleness",
    ),
    "correction_mean": Metric(
        "",
        "Mean of the correction's factor of the importance weights (correction).",
        healthy=Range(0.8, 1.25),
        action="see importance_mean",
    ),
    "correction_variance": Metric("", "Variance of the correction's factor; 0 on policy."),
    "trust_ratio_mean": Metric(
        "",
        "Mean of the trust region's ratio: student over the weights at the batch's start. "
        "Exactly 1 with one mini-batch.",
        healthy=Range(0.8, 1.25),
        action="far from 1: fewer learner.num_mini_batches, or a lower learner.optimizer.lr",
    ),
    "trust_ratio_variance": Metric("", "Variance of the trust region's ratio."),
    "effective_sample_fraction": Metric(
        "share",
        "(sum w)^2 / (n sum w^2) of the applied importance weights: the share of actions that "
        "still counts.",
        healthy=Range(0.5, 1),
        action="low: a few actions decide the update; lower schedule.max_staleness or use "
        "correction.type truncated",
    ),
    "advantage_error": Metric(
        "reward",
        "|mean over responses of (w - 1) A|, w the applied importance weights' mean over a "
        "response's tokens, A its advantage: how far the estimate of the mean advantage is from "
        "its value on policy, 0 for advantages centred over groups (GEPO Fig. 6c). It holds what "
        "the student has really gained since its responses were sampled.",
        action="grows with staleness: lower schedule.max_staleness, or another objective.type",
    ),
    "truncated_fraction": Metric(
        "share",
        "Weight share of actions whose ratio the correction cut or masked.",
        healthy=Range(0, 0.1),
        action="high: the bias of cutting grows; lower schedule.max_staleness",
        aliases={"slime": "train/tis_clipfrac"},
        differs=BY_SAMPLE,
    ),
    "stopped_fraction": Metric(
        "share",
        "Weight share of actions whose gradient the trust region stopped.",
        healthy=Range(0, 0.3),
        action="high: widen objective.trust, take fewer learner.num_mini_batches, or lower "
        "learner.optimizer.lr",
        aliases={"slime": "train/pg_clipfrac", "verl": "actor/pg_clipfrac"},
        differs=BY_SAMPLE,
    ),
    "prox_k1_nats": Metric(
        "nats a token",
        "Estimate of KL(batch's start || student): how far the update's own mini-batches moved it.",
        action="rises: fewer learner.num_mini_batches, or a lower learner.optimizer.lr",
        aliases={"slime": "train/ppo_kl", "verl": "actor/ppo_kl"},
        differs=BY_SAMPLE,
    ),
    "prox_k1_weighed_nats": Metric(
        "nats a token", "prox_k1_nats with every action weighed by the correction."
    ),
}
