"""Describes the teacher's scores; with several teachers also COLUMN/NAME, of each."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

HEALTH = {
    "health_topk_overlap": Metric(
        "share",
        "Share of the teacher's K likeliest ids (metrics.health_top_k) that are among the "
        "student's K likeliest, mean over tokens.",
        healthy=Range(0.5, 1),
        action="low and not rising: the teacher is too far from this student; take a teacher "
        "nearer to it, or fine-tune the student on the teacher's answers first (opd sft)",
        aliases={"verl": "distillation/overlap_ratio"},
    ),
    "health_overlap_advantage": Metric(
        "nats",
        "Mean of q (log p - log q) over the ids in both, p the student and q the teacher; 0 where "
        "they agree, mostly below. None overlaps: null.",
        action="does not rise towards 0: the student does not learn from what both hold likely",
        aliases={"verl": "distillation/overlap_token_advantage"},
    ),
    "health_teacher_mass": Metric(
        "share",
        "Probability that the teacher gives to the student's K likeliest ids.",
        healthy=Range(0.7, 1),
        action="low: most of what the teacher would say is out of the student's reach; use forward "
        "KL (objective.type forward_kl with support.type teacher_topk)",
    ),
    "health_student_entropy_nats": Metric(
        "nats a token",
        "Entropy of the student at its own answers, with the weights its servers have now.",
        action="far below the teacher's: the student is surer than what it learns from; look at "
        "entropy_nats over time",
    ),
    "health_teacher_entropy_nats": Metric(
        "nats a token",
        "Entropy of the teacher at the student's answers.",
        action="far above the student's: the teacher does not know these texts; shorten "
        "rollout.max_new_tokens",
    ),
    "health_loss_tokens_80": Metric(
        "share",
        "Smallest share of tokens that carries 80% of the sum of |KL(p || q)| by token.",
        action="very low (below 0.02): few tokens make the update; a larger buffer.batch_size "
        "steadies it",
    ),
    "health_eos_kl_nats": Metric(
        "nats a token",
        "KL(p || q) of whether the response ends at a token, mean over tokens.",
        healthy=Range(0, 0.01),
        action="rises: they disagree on when to stop; see the next column",
    ),
    "health_eos_gap": Metric(
        "",
        "Mean over tokens of the student's probability of ending minus the teacher's.",
        action="below 0 with growing responses: the student forgets to stop; look at length_stops",
    ),
    "health_tokens": Metric("tokens", "Tokens that these figures are of."),
    "health_update": Metric(
        "", "Update whose batch was measured; the row is the next one written after the answers."
    ),
    "health_s": Metric("s", "Time that the answers took, beside the run."),
}
"""Figures of a few responses of every metrics.health_every updates (metrics/opd_health.py)."""

LEAK = {
    "leak_hint_share": Metric(
        "share",
        "Share of what hints change about the teacher that is the hint of the row, and not what "
        "the hint of any other row changes as well (docs/hints.md). Null: they change less than "
        "0.0001 nats a token.",
        action="below 0.2 by more than its error: the hint of another row teaches as much as the "
        "right one, hints teach style; look at what the teacher reads, give it solutions with "
        "their working, or leave hints out",
    ),
    "leak_hint_share_error": Metric(
        "share", "Its standard error over the responses; null of one response."
    ),
    "leak_right_nats": Metric(
        "nats a token",
        "KL of the teacher without a hint from the teacher with the row's hint, at the student's "
        "responses: what hints change at all.",
    ),
    "leak_wrong_nats": Metric("nats a token", "The same of the hint of another row."),
    "leak_responses": Metric("responses", "Responses that these figures are of, each of a row."),
    "leak_tokens": Metric("tokens", "Tokens of these responses."),
    "leak_scored_tokens": Metric(
        "tokens",
        "Tokens that teachers read for these figures, prompts included: what they cost.",
    ),
    "leak_update": Metric(
        "", "Update whose batch was measured; the row is the next one written after the answers."
    ),
    "leak_s": Metric("s", "Time that the answers took, beside the run."),
}
"""Figures of a few hints of every metrics.leak_every updates (metrics/hint_leak.py)."""

TEACHER = {
    "samples_without_teacher": Metric(
        "samples",
        "Responses of the batch for which no teacher was asked: masked, of teacher weight 0, or "
        "with an objective that reads none.",
    ),
    "teacher_staleness_mean_versions": Metric(
        "versions",
        "Of teachers that follow the student (teacher.source): the learner's version when it "
        "trains on a sample minus that of the weights that scored it, mean over the samples.",
    ),
    "teacher_staleness_max_versions": Metric("versions", "The largest of them."),
    "aligned_token_fraction": Metric(
        "share",
        "With scoring.alignment: share of the sampled tokens of which any cached id, or with "
        "chunk their span, has a score of the teacher's.",
        action="low: the two tokenizers cut these texts at other places; unaligned: chunk",
    ),
    "aligned_mass_fraction": Metric(
        "share",
        "With scoring.alignment: probability under the sampler of the ids that have a score, a "
        "sampled token, as the cache estimates it; of a topk support that of its ids alone.",
        action="low: the loss is blind to most of what the student may write",
    ),
    "teacher_score_mean_nats": Metric(
        "nats",
        "Mean log-prob that the teacher gives the sampled tokens of the batch; with "
        "scoring.alignment its own tokens of the same text.",
        healthy=Range(None, 0),
        action="falls: the student leaves what the teacher knows; near -ln of the vocabulary's "
        "size: the server is broken (scoring.guard)",
    ),
    "teacher_score_std_nats": Metric(
        "nats",
        "Standard deviation of those log-probs.",
        healthy=Range(1e-4, None),
        action="about 0: the teacher's server answers a constant; look at its log",
    ),
    "teacher_billed_tokens": Metric(
        "tokens",
        "Tokens that servers of teachers with a price (teacher.cost_per_million_tokens) have read "
        "and written, of answered requests, since the process started.",
    ),
    "teacher_cost": Metric("", "What those tokens cost, in the currency of the price."),
    "teacher_near_uniform_fraction": Metric(
        "share",
        "Share of those log-probs within 0.05 nats of a uniform distribution's.",
        healthy=Range(0, 0.25),
        action="high: the teacher's head was not loaded, or its model is untrained",
    ),
}
