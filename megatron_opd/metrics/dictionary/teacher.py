"""Describes the teacher's scores; with several teachers also COLUMN/NAME, of each."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

TEACHER = (
    Metric(
        *("teacher_score_mean_nats", "teacher", "nats"),
        "Mean log-prob that the teacher gives the sampled tokens of the batch.",
        healthy=Range(None, 0),
        action="falls: the student leaves what the teacher knows; near -ln of the vocabulary's "
        "size: the server is broken (scoring.guard)",
    ),
    Metric(
        *("teacher_score_std_nats", "teacher", "nats"),
        "Standard deviation of those log-probs.",
        healthy=Range(1e-4, None),
        action="about 0: the teacher's server answers a constant; look at its log",
    ),
    Metric(
        *("teacher_near_uniform_fraction", "teacher", "share"),
        "Share of those log-probs within 0.05 nats of a uniform distribution's.",
        healthy=Range(0, 0.25),
        action="high: the teacher's head was not loaded, or its model is untrained",
    ),
)
