"""A weight sync by `shards`, by `broadcast` and by an older commit, side by side in one run.

    python -m benchmarks weight_sync [--tiny] [--before COMMIT] [--only WORD] [--limit N]

Real processes: torchrun's learner ranks, an SGLang server, the fleet, remote learner and session of
`opd run`; nothing is trained. The model is a random Qwen3-MoE of 604 MB in float32, at TP2 and
TP2xEP2 on both sides. The older commit (default: the last one before `shards`) is unpacked beside,
and its own learner, servers and session do the same.

For each case: seconds of every sync after the first, its phases and pause, and for how much of it
no update of the learner could begin; bytes that every rank
sent and received, as the kernel counted them; peak memory above what was there before the sync;
CPU seconds; seconds of the digests after the first sync; tokens that a fleet with requests in
flight samples in equal windows with and without a sync. As a control one bit of a received weight
is flipped, and the digests must find that slice and no other.

What it cannot say: everything is on one machine over loopback, so a "network" of memory copies that
compete with the ranks for its cores; no GPU, no NCCL. With two cores for four ranks and whatever
else runs, only ratios inside one run mean something, and CPU seconds more than seconds. A figure of
one commit is that of its defaults with the same bucket_bytes. Tokens lost depend on how fast the
server decodes here.

Rows are kept in runs/weight_sync/rows.jsonl; stopped, it goes on where it was. A row counts only
for the code and the settings that made it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.weight_sync.cases import BEFORE, SIZES, Case, chosen_cases
from benchmarks.weight_sync.older import NoCommit, check_out, full_commit
from benchmarks.weight_sync.summary import ratios, summarised
from harness.case_rows import (
    append_row,
    kept_rows,
    model_with_tokenizer,
    own_directory,
    run_program,
    say,
)
from harness.tree import ROOT
from megatron_opd.metrics.summary import commit
from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing.parameters import model_parameters

DEFAULT_BEFORE = "d1eb496"
LIMIT_S = 900.0
ROWS = Path("runs") / "weight_sync" / "rows.jsonl"
Tree = dict[str, Any]
Run = Callable[[Case, Path, Path, Path], Tree]


def measure(options: Sequence[str] = (), *, rows: Path = ROWS, run: Run | None = None) -> Tree:
    """Run what is missing; every case by name, and the ratios of each layout."""
    arguments = _arguments(options)
    size = SIZES["tiny" if arguments.tiny else "full"]
    before: str = arguments.before
    with tempfile.TemporaryDirectory(prefix="opd-weight-sync-") as directory:
        scratch = Path(directory)
        trees = {BEFORE: check_out(before, scratch / "tree")}
        cases = [case for case in chosen_cases(size) if arguments.only in case.name]
        prints = {case.name: case.fingerprint(trees.get(case.way, ROOT)) for case in cases}
        kept = kept_rows(rows, prints)
        missing = [case for case in cases if case.name not in kept]
        model = model_with_tokenizer(scratch / "model", size.model)
        for case in missing[: arguments.limit]:
            began = time.monotonic()
            made = (run or run_case)(case, trees.get(case.way, ROOT), model, scratch)
            row = {"name": case.name, "fingerprint": prints[case.name], "figures": made}
            row["commit"] = before if case.way == BEFORE else commit()
            append_row(rows, row)
            kept[case.name] = row
            say(f"{len(kept)}/{len(cases)} {case.name}: {time.monotonic() - began:.0f} s")
        parameters = model_parameters(read_model_spec(model)).total
    return _result(cases, kept, parameters, before) | {
        "size": "tiny" if arguments.tiny else "full",
        "bucket_bytes": size.bucket_bytes,
        "model": size.model,
    }


def run_case(case: Case, tree: Path, model: Path, scratch: Path) -> Tree:
    """Run one case in its tree. RuntimeError, with the ends of the logs: it failed."""
    own = own_directory(scratch)
    asked, module = case.asked(model, own), "benchmarks.weight_sync.case"
    return run_program(module, asked, own, tree=tree, limit_s=LIMIT_S)


def _arguments(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks weight_sync")
    parser.add_argument("--tiny", action="store_true", help="two cases of a model of 1 MB")
    parser.add_argument("--before", default=DEFAULT_BEFORE, metavar="COMMIT")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name holds it")
    parser.add_argument("--limit", type=int, help="run at most so many of the missing cases")
    parsed = parser.parse_args(list(options))
    try:
        parsed.before = full_commit(parsed.before)
    except NoCommit as error:
        parser.error(str(error))
    return parsed


def _result(cases: Sequence[Case], kept: dict[str, Tree], parameters: int, before: str) -> Tree:
    model_bytes = 4 * parameters
    done = [case for case in cases if case.name in kept]
    found = {case.name: summarised(kept[case.name]["figures"], model_bytes) for case in done}
    layouts = dict.fromkeys(case.layout for case in done)
    flips = {case.name: kept[case.name]["figures"]["flipped_bit"] for case in done}
    return {
        "before": before,
        "run_commits": sorted({str(kept[case.name]["commit"]) for case in done}),
        "model_bytes": model_bytes,
        "parameters": parameters,
        "missing": [case.name for case in cases if case.name not in kept],
        "cases": found,
        "times_shards": {
            layout: ratios({c.way: found[c.name] for c in done if c.layout == layout})
            for layout in layouts
        },
        "flipped_bit": flips,
        "failed": [name for name, flip in flips.items() if not _found(flip)],
    }


def _found(flip: Tree) -> bool:
    """Whether the digests agreed before and after, and differed in one slice between."""
    around = flip["differing_before"] + flip["differing_after_the_next_sync"]
    return not around and len(flip["differing"]) == 1
