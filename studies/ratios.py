"""Which cached actions have the largest importance ratios, and what they do to the update.

    python -m studies ratios

Runs the demo with a learner that also writes, of every micro-batch, each cached action's ratio and
its pull |d loss / d log p| (studies/ratios_rank.py). default: the demo as it is. tenth_lr: a
tenth of its learning rate. replayed: every token visits the experts that the sampler used, so that
no routing changes between sampler and learner. cut_at_10: ratios above 10 are cut to 10, so that a
difference in what is learnt would show what the larger ones do. Finished runs are kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.run_dirs import summary_of

DEMO = Path("examples/arithmetic/demo.yaml")
OUT = Path("runs/ratios")
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "tenth_lr": {"learner.optimizer.lr": "5.0e-5"},
    "replayed": {"learner.routing_replay": "rollout"},
    "cut_at_10": {"correction": "{type: truncated, max_ratio: 10.0}"},
}
SEEDS = (7, 8)
SIZE = {
    "evaluation.before": "false",
    "checkpoint.export_hf": "false",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}
OUT_VARIABLE = "OPD_BENCHMARK_RATIOS"
EDGES = (2.0, 10.0, 100.0)
"""Ratios above which actions are counted."""
SHOWN = 10
LIMIT_S = 1800
Row = dict[str, Any]


def measure(out: Path = OUT) -> dict[str, Any]:
    """Every run's figures; the runs that are missing are made."""
    return {
        "config": str(DEMO),
        "size": SIZE,
        "settings": SETTINGS,
        "runs": [figures(name, seed, out) for seed in SEEDS for name in SETTINGS],
    }


def figures(name: str, seed: int, out: Path) -> Row:
    """One run: what it learnt, and its ratios."""
    run_dir = out / f"{name}-{seed}"
    rows_file = out / f"{name}-{seed}.jsonl"
    if summary_of(run_dir).get("status") != "finished":
        launch(name, seed, run_dir, rows_file)
    summary = summary_of(run_dir)
    rows = [json.loads(line) for line in rows_file.open(encoding="utf-8")]
    keys = ("commit", "student_accuracy_after_pct", "ratio_p99", "ratio_max")
    keys += ("staleness_max_versions",)
    return {
        "setting": name,
        "seed": seed,
        **{key: summary[key] for key in keys},
        "evaluation": summary["evaluations"]["student after"],
        **ratios(rows),
    }


def ratios(rows: Sequence[Row]) -> Row:
    """Counts, shares and the largest ratios of a run's micro-batches."""
    pull = sum(row["pull"] for row in rows)
    kinds = rows[0]["ratio_max"]
    largest = [
        action | {"row": index, "share_of_micro_batch": action["pull"] / row["pull"]}
        for index, row in enumerate(rows)
        for action in row["top"]
    ]
    largest.sort(key=lambda action: -action["ratio"])
    return {
        "micro_batches": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "actions": sum(row["actions"] for row in rows),
        "unweighed_path_tokens": sum(row["unweighed"] for row in rows),
        "pull_of_unweighed": sum(row["pull_unweighed"] for row in rows),
        "above": {str(edge): above(rows, str(edge), pull) for edge in EDGES},
        "ratio_max_of": {
            kind: max((row["ratio_max"][kind] or 0.0 for row in rows), default=None)
            for kind in kinds
        },
        "largest": largest[:SHOWN],
    }


def above(rows: Sequence[Row], edge: str, pull: float) -> Row:
    """What the actions of ratios above `edge` are in number and in pull."""
    found = [row["above"][edge] | {"all": row["pull"]} for row in rows]
    return {
        "actions": sum(each["actions"] for each in found),
        "micro_batches": sum(each["actions"] > 0 for each in found),
        "share_of_pull": sum(each["pull"] for each in found) / pull,
        "largest_share_in_a_micro_batch": max(each["pull"] / each["all"] for each in found),
    }


def launch(name: str, seed: int, run_dir: Path, rows_file: Path) -> None:
    """Make one run. RuntimeError: it failed."""
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    rows_file.unlink(missing_ok=True)
    values = SIZE | SETTINGS[name] | {"run.dir": str(run_dir), "run.seed": str(seed)}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "studies.ratios", "run", str(DEMO), "--overwrite", *sets],
        env={**os.environ, OUT_VARIABLE: str(rows_file)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> int:
    """`opd` whose learner is studies/ratios_rank.py."""
    from megatron_opd.cli.main import main as opd
    from megatron_opd.launch import learner_process

    start = learner_process.LearnerProcess.start

    def start_recording(process: learner_process.LearnerProcess) -> None:
        module = {"megatron_opd.learner": "studies.ratios_rank"}
        process.command = [module.get(word, word) for word in process.command]
        start(process)

    learner_process.LearnerProcess.start = start_recording
    return opd()


if __name__ == "__main__":
    raise SystemExit(main())
