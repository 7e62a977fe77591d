"""Describes what sampler sites send; only runs with sites.members have these columns."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

SITES = (
    Metric(
        *("sites_connected", "rollout", "sites"),
        "Sampler sites that are part of the run and whose links work.",
        healthy=Range(low=1),
        action="fewer than sites.members: the terminal says which one is lost or refused, and why",
    ),
    Metric(
        *("sites_quarantined", "rollout", "sites"),
        "Sampler sites of which nothing more is taken, after malformed or forged samples.",
        healthy=Range(0, 0),
        action="the terminal says why; docs/sites.md",
    ),
    Metric(
        *("site_samples", "rollout", "samples"),
        "Samples of sites that were taken, since the process started.",
    ),
    Metric(
        *("site_duplicates", "rollout", "samples"),
        "Answers of sites to prompts that were answered already; they change nothing.",
        action="many: sites.lost_after_s is shorter than links usually break",
    ),
    Metric(
        *("site_samples_refused", "rollout", "samples"),
        "Malformed or forged samples and messages of sites.",
        healthy=Range(0, 0),
        action="the log of the run says what was wrong with each",
    ),
    Metric(
        *("site_lost", "rollout", ""),
        "How often the prompts of a site that was lost were given to others.",
    ),
    Metric(
        *("site_behind_versions_mean", "rollout", "versions"),
        "How far the oldest token of a site's sample was behind the newest version when it came; "
        "over all samples so far.",
        action="near sites.max_staleness: fewer slots, or a faster link for the weights",
    ),
    Metric(*("site_behind_versions_max", "rollout", "versions"), "The largest of these."),
    Metric(
        *("site_delay_s_mean", "rollout", "s"),
        "Time from the end of sampling until the learner's site had a sample; over all so far.",
    ),
    Metric(
        *("site_delay_s_max", "rollout", "s"),
        "The largest of these; samples above sites.max_delay_s were dropped (too_late).",
    ),
)
