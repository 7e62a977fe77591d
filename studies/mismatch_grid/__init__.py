"""The gap between learner and sampler over layouts, number formats, lengths and kernels.

    python -m studies mismatch_grid [--only WORD] [--limit N]

For every kind of server (TP1, TP2, TP2xEP2; float32, bfloat16; with deterministic kernels and
without) real processes are started once. It samples responses of 48 and of 240 tokens to random
prompts, three sets of them. Learners of several layouts (1, TP2, CP2, TP2xEP2) then score these
very responses, with the same weights: so learners are compared on the same tokens, servers on the
same prompts. The number format is the same on both sides.

`decode`: |p_sampler - p_learner| with the probabilities that tokens were sampled with. `prefill`:
the server's own scores of the finished responses instead. `decode_replayed`: with the server's
experts (routing replay); `decode_replayed_gates`: and with their weights. `decode_prefill`: the
server against itself. max_dp: the mean over a set's responses of each one's largest gap; mean_dp:
over all tokens. Each is given by set, so that the spread over sets is known. Controls:
`without_sync`, where the server holds other weights, must be far off; float32 must be close.
`1x_of_5`: the largest gap of five short responses to a prompt.

What it cannot say: the models are tiny, random and shallow, and the kernels are a CPU's.

Rows are kept in runs/mismatch_grid/rows.jsonl; stopped, it goes on where it was. A row counts only
for the code that made it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from harness.case_rows import (
    case_parser,
    old_and_new,
    own_directory,
    run_commits,
    run_missing,
    run_program,
)
from megatron_opd.checkpoint.hf_files import SINGLE
from studies.grid.statistics import interval
from studies.mismatch_grid.cases import (
    HEAD_GAIN,
    LENGTHS,
    MATCHED,
    MODELS,
    PROMPTS,
    SEEDS,
    SERVERS,
    Case,
    all_cases,
)

ROWS = Path("runs") / "mismatch_grid" / "rows.jsonl"
LIMIT_S = 900.0
MOST_FLOAT32 = 1e-3  # |dp| of any token
LEAST_WITHOUT_SYNC = 0.05  # of the largest |dp| of a response, median
Tree = dict[str, Any]


def measure(options: Sequence[str] = (), *, rows: Path = ROWS) -> Tree:
    """Run what is missing; every case by name, what was read of them, and which failed."""
    arguments = case_parser("python -m studies mismatch_grid").parse_args(list(options))
    cases = {case.name: case for case in all_cases() if arguments.only in case.name}
    prints = {name: case.fingerprint() for name, case in cases.items()}
    with tempfile.TemporaryDirectory(prefix="opd-mismatch-grid-") as directory:
        scratch = Path(directory)
        models = {name: _models(scratch / name, config) for name, config in MODELS.items()}

        def run(name: str) -> Tree:
            figures = run_case(cases[name], models[cases[name].model], scratch)
            return {"factors": asdict(cases[name]), "figures": figures}

        kept = run_missing(prints, run, rows, arguments.limit)
    done = [row["factors"] | row["figures"] | {"name": name} for name, row in kept.items()]
    entries = [entry for each in done for entry in entries_of(each)]
    return {
        "run_commits": run_commits(kept.values()),
        "responses_of_a_set": {"1x": 5 * PROMPTS, "5x": PROMPTS},
        "sets": len(SEEDS),
        "tokens": dict(LENGTHS),
        "missing": [name for name in cases if name not in kept],
        "seconds": {name: row["seconds"] for name, row in kept.items()},
        "reading": reading(entries),
        "entries": entries,
        "cases": {each["name"]: each for each in done},
        "failed": [each["name"] for each in done if not passed(each)],
    }


def run_case(case: Case, models: Tree, scratch: Path) -> Tree:
    """Run one case. RuntimeError, with the ends of the logs: it failed."""
    own = own_directory(scratch)
    server = {"max_total_tokens": 32768, "max_running_requests": 160, "mem_fraction_static": 0.3}
    server |= {"model": str(models["new"]), "dtype": case.dtype, "context_length": 512}
    replay, weights = ("rollout", "sampler") if case.model == "moe" else ("off", "learner")
    config = {
        "data": {"train": "unused"},
        "student": server | SERVERS[case.server],
        "teacher": {"model": str(models["new"])},
        "rollout": {"max_new_tokens": max(LENGTHS.values()), "concurrency": 160},
        "objective": {"type": "forward_kl"},  # its support is the teacher's: the path alone
        "learner": {
            "dtype": case.dtype,
            "threads": 1,
            "routing_replay": replay,
            "routing_weights": weights,
            "max_tokens_per_microbatch": 4096,
        },
        "run": {"dir": str(own / "run"), "deterministic": case.deterministic, "seed": 5},
        "buffer": {"batch_size": 60},
        "schedule": {"type": "controlled"},
    }
    asked = {"config": config, "old": str(models["old"]), "learners": case.learners}
    return run_program("studies.mismatch_grid.case", asked, own, limit_s=LIMIT_S)


def entries_of(case: Tree) -> list[Tree]:
    """One entry for each learner, comparison and length, with intervals over the sets."""
    found: list[Tree] = []
    for learner, figures in case["learners"].items():
        about = {key: case[key] for key in ("model", "server", "dtype", "deterministic")}
        about |= {"learner": learner, "matched": MATCHED[case["server"]] == learner}
        for kind in ("decode", "prefill", "decode_replayed", "decode_replayed_gates"):
            for length, gap in figures.get(kind, {}).items():
                means = {key: interval(gap[key]) for key in ("max_dp", "mean_dp") if key in gap}
                rest = {key: gap.get(key) for key in ("largest", "k3_nats", "responses_above")}
                found.append(about | {"kind": kind, "length": length} | means | rest)
    return found


def reading(entries: Sequence[Tree]) -> Tree:
    """Ratios with all but one factor the same: medians over the pairs, and how many rose."""
    keys = ("model", "server", "dtype", "deterministic", "learner", "kind", "length")
    values = {tuple(e[key] for key in keys): e for e in entries}

    def ratios(key: str, over: Any, under: Any, figure: str, **only: object) -> Tree:
        found = []
        for entry in entries:
            if entry[key] != over or any(entry[k] != v for k, v in only.items()):
                continue
            other = values.get(tuple(under if k == key else entry[k] for k in keys))
            if other is not None and figure in entry and figure in other:
                low = other[figure]["mean"]
                found.append(entry[figure]["mean"] / low if low else None)
        return _summary(found)

    result: Tree = {}
    for dtype in ("float32", "bfloat16"):
        now: Tree = {"dtype": dtype, "deterministic": False}
        decode = now | {"kind": "decode"}
        result[dtype] = {
            "max_dp 5x / 1x": ratios("length", "5x", "1x", "max_dp", **decode),
            "mean_dp 5x / 1x": ratios("length", "5x", "1x", "mean_dp", **decode),
            "max_dp five of 1x / 1x": ratios("length", "1x_of_5", "1x", "max_dp", **decode),
            "max_dp start of 5x / 1x": ratios("length", "5x_start", "1x", "max_dp", **decode),
            "max_dp prefill / decode": ratios("kind", "prefill", "decode", "max_dp", **now),
            "max_dp replayed / free": ratios("kind", "decode_replayed", "decode", "max_dp", **now),
            "mean_dp replayed / free": ratios(
                "kind", "decode_replayed", "decode", "mean_dp", **now
            ),
            **{
                f"{figure} replayed gates / experts": ratios(
                    "kind", "decode_replayed_gates", "decode_replayed", figure, **now
                )
                for figure in ("max_dp", "mean_dp")
            },
            "max_dp deterministic / not": ratios(
                "deterministic", True, False, "max_dp", dtype=dtype, kind="decode"
            ),
            "max_dp other layout / matched": other_layouts(entries, dtype, "max_dp"),
            "mean_dp other layout / matched": other_layouts(entries, dtype, "mean_dp"),
        }
    result["max_dp bfloat16 / float32"] = ratios(
        "dtype", "bfloat16", "float32", "max_dp", kind="decode", deterministic=False
    )
    return result


def other_layouts(entries: Sequence[Tree], dtype: str, figure: str) -> Tree:
    """The gap of learners split otherwise than the server over that of the learner split alike.

    The same tokens, without deterministic kernels; by kind of comparison and learner.
    """
    found: dict[str, list[float | None]] = {}
    for entry in entries:
        if entry["dtype"] != dtype or entry["deterministic"] or figure not in entry:
            continue
        if entry["matched"] or entry["length"] not in LENGTHS:
            continue
        same = ("model", "server", "dtype", "deterministic", "kind", "length")
        alike = [e for e in entries if e["matched"] and all(e[key] == entry[key] for key in same)]
        if alike and alike[0][figure]["mean"]:
            name = f"{entry['kind']}: {entry['learner']} to {entry['server']}"
            ratio = entry[figure]["mean"] / alike[0][figure]["mean"]
            found.setdefault(name, []).append(ratio)
    return {name: _summary(ratios) for name, ratios in found.items()}


def _summary(ratios: Sequence[float | None]) -> Tree:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return {"pairs": 0}
    return {
        "pairs": len(known),
        "median": statistics.median(known),
        "least": min(known),
        "most": max(known),
        "above_1": sum(ratio > 1 for ratio in known),
    }


def passed(case: Tree) -> bool:
    """Whether other weights are far off, and in float32 the same weights are not."""
    if case["without_sync"]["largest"]["median"] < LEAST_WITHOUT_SYNC:
        return False
    largest = max(f["decode"]["5x"]["largest"]["max"] for f in case["learners"].values())
    return case["dtype"] != "float32" or largest <= MOST_FLOAT32


def _models(path: Path, config: Tree) -> Tree:
    """Two random checkpoints of one architecture, peaked, whose responses never end."""
    made = old_and_new(path, config)
    for model in made.values():
        tensors = load_file(model / SINGLE)
        head = tensors["lm_head.weight"] * HEAD_GAIN
        head[special_ids(model)] = 0  # far below the likely ids: hardly ever sampled
        save_file(tensors | {"lm_head.weight": head}, model / SINGLE, {"format": "pt"})
    return made


def special_ids(model: Path) -> list[int]:
    """The tokenizer's ids that are no text, the end of a sequence among them."""
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    return [token["id"] for token in tokenizer["added_tokens"]]
