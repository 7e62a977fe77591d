"""Weight syncs in which a server is killed, stopped, or receives a flipped bit, in every phase.

    python -m checks sync_chaos [--repetitions N] [--only WORD] [--rounds N] [--relay]

A Megatron learner of two ranks and several SGLang servers, with requests in flight. Before each
weight sync the learner trains, so that the weights differ. At a random moment of one phase one of
the servers gets SIGKILL or SIGSTOP, with all of its processes, or one bit of what it received is
flipped. With --relay the servers are a chain, along which they pass weights on. What must hold
afterwards: the sync has ended within weight_sync.timeout_s; the other servers (after a flipped bit:
all) hold the new version and digests of every slice equal the learner's; no request was lost, and
none has tokens of a version that is not there.

Two controls must fail: with weight_sync.tries: 1 a killed server ends the sync, by name; and
without verification a flipped bit stays, in that slice alone.

What it cannot say: one machine, over loopback; a network that is cut is not among the faults, and
neither is a learner rank (see chaos). How long a stopped server costs is weight_sync.timeout_s
and nothing else.

Rows are kept in runs/sync_chaos/rows.jsonl as they come; stopped, it goes on where it was. A row
counts only for the code that made it. A fault that comes when the sync is over is not counted, but
tried again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks.sync_chaos.faults import CONTROLS, KINDS, MODEL, VICTIMS, Fault, rounds
from harness.case_rows import (
    append_row,
    fingerprint_of,
    kept_rows,
    model_with_tokenizer,
    own_directory,
    run_commits,
    run_program,
    say,
)
from megatron_opd.metrics.summary import commit

ROWS = Path("runs") / "sync_chaos" / "rows.jsonl"
LIMIT_S = 1200.0
TIMEOUT_S = 36.0
Tree = dict[str, Any]


def measure(options: Sequence[str] = (), *, rows: Path = ROWS) -> Tree:
    """Run what is missing; how every kind of fault ended, and which rows failed."""
    arguments = _arguments(options)
    wanted = {
        f"{kind} {number}": kind
        for number in range(arguments.repetitions)
        for kind in (*KINDS, *CONTROLS)
        if arguments.only in str(kind)
    }
    made_by = fingerprint_of([MODEL, arguments.relay], "checks/sync_chaos")
    prints = dict.fromkeys(wanted, made_by)
    kept = kept_rows(rows, prints)
    missing = {name: kind for name, kind in wanted.items() if name not in kept}
    with tempfile.TemporaryDirectory(prefix="opd-sync-chaos-") as directory:
        scratch = Path(directory)
        model = model_with_tokenizer(scratch / "model", MODEL)
        for number, planned in enumerate(rounds(missing)[: arguments.rounds]):
            began = time.monotonic()
            seed = random.Random(f"{arguments.seed} {len(kept)} {number}").getrandbits(32)
            found = run_round(planned, model, scratch, seed, relay=arguments.relay)
            for name, figures in found.items():
                if figures["missed"]:  # of no phase; tried again
                    say(f"{name}: the sync was over before the fault came")
                    continue
                row = {"name": name, "fingerprint": prints[name], "commit": commit()}
                append_row(rows, row | {"kind": str(wanted[name]), "figures": figures})
                kept[name] = row | {"kind": str(wanted[name]), "figures": figures}
            say(f"{len(kept)}/{len(wanted)} rows, {time.monotonic() - began:.0f} s")
    return {
        "run_commits": run_commits(kept.values()),
        "timeout_s": TIMEOUT_S,
        "relay": arguments.relay,
        "rows_wanted": len(wanted),
        "missing": len(wanted) - len(kept),
        "kinds": _summary(kept),
        "failed": [name for name, row in kept.items() if not row["figures"]["held"]],
    }


def run_round(
    planned: dict[str, Fault], model: Path, scratch: Path, seed: int, *, relay: bool
) -> Tree:
    """Several faults, one after the other, on the same learner; {row: figures}."""
    own = own_directory(scratch)
    kinds = list(planned.values())
    server: Tree = {"max_total_tokens": 2048, "max_running_requests": 8, "dtype": "float32"}
    server |= {"model": str(model), "mem_fraction_static": 0.3}
    config = {
        "data": {"train": "unused"},
        "student": server | {"servers": 1 + VICTIMS},
        "teacher": {"model": str(model)},
        "learner": {"dtype": "float32", "threads": 1, "parallel": {"tp": 2}},
        "weight_sync": {
            "bucket_bytes": 2**20,
            "staging": kinds[0].staged,
            "relay": relay,
            "timeout_s": TIMEOUT_S,
            "verify_every": 1,
        },
        "run": {"dir": str(own / "run")},
        "buffer": {"batch_size": 4},
    }
    asked = {
        "config": config,
        "faults": [{"row": row, **fault.asked()} for row, fault in planned.items()],
        "seed": seed,
    }
    return run_program("checks.sync_chaos.case", asked, own, limit_s=LIMIT_S)


def _arguments(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m checks sync_chaos")
    parser.add_argument("--repetitions", type=int, default=20, metavar="N", help="of every kind")
    parser.add_argument("--only", default="", metavar="WORD", help="kinds whose name holds it")
    parser.add_argument("--rounds", type=int, help="run at most so many rounds of faults")
    parser.add_argument("--relay", action="store_true", help="with weight_sync.relay")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    return parser.parse_args(list(options))


def _summary(kept: dict[str, Tree]) -> Tree:
    by_kind: dict[str, list[Tree]] = defaultdict(list)
    for row in kept.values():
        by_kind[row["kind"]].append(row["figures"])
    return {
        kind: {
            "rows": len(found),
            "held": sum(figures["held"] for figures in found),
            "tries": sorted({figures["tries"] for figures in found if figures["tries"]}),
            "seconds_median": round(statistics.median(f["seconds"] for f in found), 2),
            "seconds_max": round(max(f["seconds"] for f in found), 2),
            "restarted_requests": sum(f["restarted_requests"] for f in found),
            "examples": found[0]["said"],
        }
        for kind, found in sorted(by_kind.items())
    }
