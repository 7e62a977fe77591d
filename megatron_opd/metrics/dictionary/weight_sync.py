"""Describes the weight sync that followed an update; null where none did (schedule.sync_every)."""

from __future__ import annotations

from megatron_opd.metrics.metric import Metric, Range

WEIGHT_SYNC = {
    "publish_s": Metric(
        "s",
        "Time of the whole weight sync.",
        action="slow: see docs/weight_sync.md; weight_sync.type shards, or weight_sync.overlap",
        aliases={"slime": "perf/update_weights_time", "verl": "timing_s/param_sync"},
    ),
    "pause_s": Metric(
        "s",
        "Time in which no server sampled.",
        action="near publish_s: weight_sync.overlap or a transport that stages weights",
    ),
    "learner_held_s": Metric(
        "s",
        "Time after the update in which the weight sync let no other one begin.",
        action="near publish_s: set weight_sync.overlap",
    ),
    "publish_bytes": Metric(
        "bytes",
        "Bytes that one server rank received, the largest number of them (broadcast: all buckets).",
        aliases={"slime": "perf/update_weights_wire_bytes"},
    ),
    "publish_tries": Metric(
        "tries",
        "Tries of the weight sync, with the last one.",
        healthy=Range(1, 1),
        action="above 1: a server failed meanwhile; its log says why",
    ),
    "teacher_publish_s": Metric(
        "s",
        "Time of the weight syncs of teachers that follow the student (teacher.source), just "
        "before the student's; only where there was one.",
        action="slow: raise teacher.source.every",
    ),
    "servers": Metric(
        "",
        "For every student server its version after the sync (null: it took no part), and the "
        "rollouts and tokens that it finished since the one before. The only column that is no "
        "number: in metrics.jsonl alone.",
        action="a version of null: the server was lost or removed; very unequal tokens: one is "
        "slower",
    ),
    "memory_release_s": Metric(
        "s",
        "Time before the update in which memory went from the servers to the learner "
        "(schedule.time_shared).",
    ),
    "memory_resume_s": Metric(
        "s",
        "Time of the weight sync in which memory went back to the servers (schedule.time_shared).",
    ),
    "window_updates": Metric(
        "updates", "Updates since the weight sync before: schedule.sync_every, except at the end."
    ),
}
