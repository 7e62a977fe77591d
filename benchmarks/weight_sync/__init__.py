"""A weight sync by `shards` and by `broadcast`, side by side in one run.

    python -m benchmarks weight_sync [--tiny] [--only WORD] [--limit N]

Real processes: torchrun's learner ranks, an SGLang server, the fleet, remote learner and session of
`opd run`; nothing is trained. The model is a random Qwen3-MoE of 604 MB in float32, at TP2 and
TP2xEP2 on both sides.

For each case: seconds of every sync after the first, its phases and pause, and for how much of it
no update of the learner could begin; bytes that every rank
sent and received, as the kernel counted them; peak memory above what was there before the sync;
CPU seconds; seconds of the digests after the first sync; tokens that a fleet with requests in
flight samples in equal windows with and without a sync. As a control one bit of a received weight
is flipped, and the digests must find that slice and no other.

What it cannot say: everything is on one machine over loopback, so a "network" of memory copies that
compete with the ranks for its cores; no GPU, no NCCL. With two cores for four ranks and whatever
else runs, only ratios inside one run mean something, and CPU seconds more than seconds. Tokens lost
depend on how fast the server decodes here.

Rows are kept in runs/weight_sync/rows.jsonl; stopped, it goes on where it was. A row counts only
for the code and the settings that made it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.weight_sync.cases import SIZES, Case, chosen_cases
from benchmarks.weight_sync.summary import ratios, summarised
from harness.case_rows import (
    case_parser,
    model_with_tokenizer,
    own_directory,
    run_commits,
    run_missing,
    run_program,
)
from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing.parameters import model_parameters

LIMIT_S = 900.0
ROWS = Path("runs") / "weight_sync" / "rows.jsonl"
Tree = dict[str, Any]


def measure(options: Sequence[str] = (), *, rows: Path = ROWS) -> Tree:
    """Run what is missing; every case by name, and the ratios of each layout."""
    parser = case_parser("python -m benchmarks weight_sync")
    parser.add_argument("--tiny", action="store_true", help="two cases of a model of 1 MB")
    arguments = parser.parse_args(list(options))
    size = SIZES["tiny" if arguments.tiny else "full"]
    cases = {case.name: case for case in chosen_cases(size) if arguments.only in case.name}
    prints = {name: case.fingerprint() for name, case in cases.items()}
    with tempfile.TemporaryDirectory(prefix="opd-weight-sync-") as directory:
        scratch = Path(directory)
        model = model_with_tokenizer(scratch / "model", size.model)
        kept = run_missing(
            prints,
            lambda name: {"figures": run_case(cases[name], model, scratch)},
            rows,
            arguments.limit,
        )
        parameters = model_parameters(read_model_spec(model)).total
    return _result(list(cases.values()), kept, parameters) | {
        "size": "tiny" if arguments.tiny else "full",
        "bucket_bytes": size.bucket_bytes,
        "model": size.model,
    }


def run_case(case: Case, model: Path, scratch: Path) -> Tree:
    """Run one case. RuntimeError, with the ends of the logs: it failed."""
    own = own_directory(scratch)
    return run_program("benchmarks.weight_sync.case", case.asked(model, own), own, limit_s=LIMIT_S)


def _result(cases: Sequence[Case], kept: dict[str, Tree], parameters: int) -> Tree:
    model_bytes = 4 * parameters
    done = [case for case in cases if case.name in kept]
    found = {case.name: summarised(kept[case.name]["figures"], model_bytes) for case in done}
    layouts = dict.fromkeys(case.layout for case in done)
    flips = {case.name: kept[case.name]["figures"]["flipped_bit"] for case in done}
    return {
        "run_commits": run_commits(kept.values()),
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
