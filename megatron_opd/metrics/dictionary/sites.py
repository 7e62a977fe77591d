"""Describes what sampler sites send; only runs with sites.members have these columns."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

SITES = {
    "sites_connected": Metric(
        "sites",
        "Sampler sites that are part of the run and whose links work.",
        healthy=Range(low=1),
        action="fewer than sites.members: the terminal says which one is lost or refused, and why",
    ),
    "sites_quarantined": Metric(
        "sites",
        "Sampler sites of which nothing more is taken, after malformed or forged samples.",
        healthy=Range(0, 0),
        action="the terminal says why; docs/sites.md",
    ),
    "site_samples": Metric(
        "samples", "Samples of sites that were taken, since the process started."
    ),
    "site_duplicates": Metric(
        "samples",
        "Answers of sites to prompts that were answered already; they change nothing.",
        action="many: sites.lost_after_s is shorter than links usually break",
    ),
    "site_samples_refused": Metric(
        "samples",
        "Malformed or forged samples and messages of sites.",
        healthy=Range(0, 0),
        action="the log of the run says what was wrong with each",
    ),
    "site_lost": Metric("", "How often the prompts of a site that was lost were given to others."),
    "site_behind_versions_mean": Metric(
        "versions",
        "How far the oldest token of a site's sample was behind the newest version when it came; "
        "over all samples so far.",
        action="near sites.max_staleness: fewer slots, or a faster link for the weights",
    ),
    "site_behind_versions_max": Metric("versions", "The largest of these."),
    "site_delay_s_mean": Metric(
        "s", "Time from the end of sampling until the learner's site had a sample; over all so far."
    ),
    "site_delay_s_max": Metric(
        "s", "The largest of these; samples above sites.max_delay_s were dropped (too_late)."
    ),
}
