"""Weights shard to shard between real learners and real servers of many layouts.

    python -m checks sync_layouts [--only WORD] [--limit N]

A Megatron learner (1, TP2, PP2, VPP2, EP2, TP2xEP2, DP2, CP2) sends its weights to one or two
SGLang servers (TP1, TP2, TP2xEP2) that loaded another checkpoint: a dense model with a tied head, a
dense one with biases, a mixture of experts; float32 and bfloat16, staged and not, relayed from the
first server to the second one and not. Every pair of two factors' values that can be met is met at
least once.

For each case: the largest error of the servers' log-probs of fixed sequences after the sync,
against transformers in float32 (limit 1e-5 nats) or, in bfloat16, against a server that loaded the
learner's checkpoint (limit 0); the same error before the sync, which must be large (the control);
bytes received by the fullest rank over the bytes of its own shard (must be 1). The sync itself
compares the digests of every slice and fails where one differs.

What it cannot say: the models are tiny and everything is on one machine; nothing is timed here
(python -m benchmarks weight_sync). A model whose KV heads several ranks copy is not among them:
SGLang does not load one on a CPU. Nor is one whose features per rank are no multiple of 64: SGLang
pads those on a CPU, and a weight sync by shards refuses such a server by name.

Rows are kept in runs/sync_layouts/rows.jsonl; stopped, it goes on where it was. A row counts only
for the code that made it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checks.sync_layouts.cases import FLEETS, LEARNERS, Case, all_cases
from harness.case_rows import (
    case_parser,
    old_and_new,
    own_directory,
    run_commits,
    run_missing,
    run_program,
)
from harness.tiny_models import MODELS

ROWS = Path("runs") / "sync_layouts" / "rows.jsonl"
LIMIT_S = 600.0
MOST_NATS = {"float32": 1e-5, "bfloat16": 0.0}
LEAST_OLD_NATS = 1e-2
Tree = dict[str, Any]


def measure(options: Sequence[str] = (), *, rows: Path = ROWS) -> Tree:
    """Run what is missing; every case by name, and which of them failed."""
    arguments = case_parser("python -m checks sync_layouts").parse_args(list(options))
    cases = {case.name: case for case in all_cases() if arguments.only in case.name}
    prints = {name: case.fingerprint() for name, case in cases.items()}
    with tempfile.TemporaryDirectory(prefix="opd-sync-layouts-") as directory:
        scratch = Path(directory)
        models = {name: old_and_new(scratch / name, config) for name, config in MODELS.items()}

        def run(name: str) -> Tree:
            figures = run_case(cases[name], models[cases[name].model], scratch)
            return {"factors": asdict(cases[name]), "figures": figures}

        kept = run_missing(prints, run, rows, arguments.limit)
    done = {name: row["factors"] | row["figures"] for name, row in kept.items()}
    return {
        "run_commits": run_commits(kept.values()),
        "cases_wanted": len(cases),
        "missing": [name for name in cases if name not in kept],
        "worst_error_nats": _worst(done),
        "cases": done,
        "failed": [name for name, figures in done.items() if not _passed(figures)],
    }


def run_case(case: Case, models: Tree, scratch: Path) -> Tree:
    """Run one case. RuntimeError, with the ends of the logs: it failed."""
    own = own_directory(scratch)
    server = {"max_total_tokens": 2048, "max_running_requests": 8, "mem_fraction_static": 0.3}
    server |= {"model": str(models["new"]), "dtype": case.dtype, "servers": case.servers}
    parallel = LEARNERS[case.learner]
    config = {
        "data": {"train": "unused"},
        "student": server | FLEETS[case.fleet],
        "teacher": {"model": str(models["new"])},
        "learner": {"dtype": case.dtype, "threads": 1, "parallel": parallel},
        # several buckets of several slices
        "weight_sync": {
            "type": "shards",
            "bucket_bytes": 50_000,
            "staging": case.staging,
            "relay": case.relay,
        },
        "run": {"dir": str(own / "run")},
        "buffer": {"batch_size": 4},
    }
    asked = {"config": config, "old": str(models["old"])}
    return run_program("checks.sync_layouts.case", asked, own, limit_s=LIMIT_S)


def _passed(figures: Tree) -> bool:
    """Whether the new weights are there, the old ones were not, and nothing came twice."""
    return (
        figures["error_nats"] <= MOST_NATS[figures["dtype"]]
        and figures["error_of_old_weights_nats"] >= LEAST_OLD_NATS
        and figures["received_bytes"] == figures["shard_bytes"]
    )


def _worst(done: dict[str, Tree]) -> Tree:
    return {
        dtype: max((f["error_nats"] for f in done.values() if f["dtype"] == dtype), default=None)
        for dtype in MOST_NATS
    }
