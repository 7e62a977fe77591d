"""Describes time, throughput, memory and how full the pipeline is."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

PERF = {
    "time_s": Metric(
        "s",
        "When the update was done, since the run began; time before a resumption counts, time in "
        "between does not.",
    ),
    "unix_time_s": Metric("s", "When the row was made, in seconds since 1970."),
    "train_s": Metric(
        "s",
        "Time of the update, from the batch being there to the learner's answer.",
        action="rises: longer responses, or memory that is swapped",
        aliases={"slime": "perf/train_time", "verl": "timing_s/update_actor"},
        differs="verl leaves the log-probs of the batch's start out",
    ),
    "forward_backward_s": Metric("s", "Time of the forward and backward passes of the update."),
    "optimizer_s": Metric("s", "Time of the optimizer's steps of the update."),
    "cpu_s": Metric(
        "s",
        "CPU seconds that the update took on the learner's first rank; not there on GPUs.",
        action="far below train_s: others have the cores (learner.threads, student.threads)",
    ),
    "tokens_per_s": Metric(
        "tokens/s",
        "Response tokens of the batch over the time since the update before: the speed of the "
        "whole pipeline.",
        action="falls: the window's idle ratios say which side waits",
    ),
    "tflops_per_rank": Metric(
        "TFLOP/s",
        "Floating-point operations of the model per second and learner rank.",
        aliases={"slime": "perf/actor_train_tflops"},
    ),
    "mfu": Metric(
        "share",
        "tflops_per_rank over the GPU's bfloat16 peak; not there where the peak is not known.",
        aliases={"verl": "perf/mfu/actor"},
    ),
    "peak_rss_bytes": Metric(
        "bytes",
        "Largest memory of the learner's processes so far, summed over its ranks.",
        action="grows from update to update: a leak, please report it",
    ),
    "rolling_samples": Metric(
        "samples",
        "Prompts that waited for a rollout or were in one when the row was written.",
        action="0 beside a busy learner: raise rollout.concurrency or schedule.max_staleness",
    ),
    "scoring_samples": Metric(
        "samples",
        "Rollouts that waited for a teacher or were at one.",
        action="most of permits_in_use: the teacher limits; raise scoring.concurrency or "
        "teacher.servers",
    ),
    "buffered_samples": Metric(
        "samples",
        "Scored samples that waited for the learner.",
        action="full in every row: the learner limits; more ranks, or a lower "
        "schedule.max_staleness",
    ),
    "permits_in_use": Metric(
        "samples", "Samples under way: rolling, scoring and buffered, and those of the update."
    ),
    "window_learner_idle_ratio": Metric(
        "share",
        "Share of the window in which the learner neither trained nor took part in a weight sync.",
        healthy=Range(0, 0.3),
        action="high: rollouts or teachers limit; add student.servers, raise rollout.concurrency "
        "or schedule.max_staleness",
        aliases={"verl": "fully_async/trainer/idle_ratio"},
    ),
    "window_sampler_idle_ratio": Metric(
        "share",
        "Share of the window in which no prompt was in a rollout or waited for one, or the servers "
        "were paused.",
        healthy=Range(0, 0.3),
        action="high: the learner limits, or weight syncs are slow (pause_s); raise "
        "schedule.max_staleness, set weight_sync.overlap",
        aliases={"verl": "fully_async/rollouter/idle_ratio"},
    ),
}
