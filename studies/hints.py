"""What self-distillation with a hint teaches, beside what the meter of hints says of it.

    python -m studies hints [--only WORD] [--limit N] [--dirty]

Runs of examples/hints, three seeds each, that differ in one thing from `solution`: what the teacher
reads in front of the problem (the solution; another row's; ! alone; the bare result; nothing), and
for collapses, at a higher learning rate, whose weights it has (the student's now, an average of
them, those of the checkpoint). Accuracies are the student's without any hint. Run directories stay
in runs/hints_study: stopped, the study goes on where it was. `failed` unless, in every seed, the
meter ranks the hints rightly before the first update, the right solution teaches more than twice
what the other row's or style does, and what is said to collapse does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from harness.case_rows import run_commits
from harness.run_dirs import updates_of
from harness.tree import clean_commit, marked_commit
from studies.grid.trials import Launch, Trial, launch, run_trials

CONFIG = Path("examples/hints/hints.yaml")
OUT = Path("runs/hints_study")
SEEDS = (1, 2, 3)
HINTS = {
    "solution": "solution",
    "wrong_solution": "wrong_solution",
    "style": "style",
    "result": "result",
    "none": "nothing",  # the teacher reads what the student reads
}
"""The column that the teacher reads, by the hint's name."""
HIGH_LR = {"learner.optimizer.lr": "1.0e-3"}
TEACHERS = {
    "live": HIGH_LR | {"teacher.source": "{type: student}"},
    "averaged": HIGH_LR | {"teacher.source": "{type: ema, decay: 0.99}"},
    "frozen": HIGH_LR | {"teacher.source": "{type: checkpoint}"},
}
"""Whose weights the teacher of a solution has, at the high learning rate."""
SIZE = {
    "run.max_steps": "24",
    "learner.optimizer.lr_scheduler": "constant",
    "evaluation.before": "false",
    "checkpoint.export_hf": "false",
    "student.startup_timeout_s": "300",
    "teacher.startup_timeout_s": "300",
    "metrics": "{leak_every: 8, leak_samples: 32, tensorboard: false, trace: false, "
    "progress: false, rollouts: 0}",
}
TEACHES_PCT, OTHERS, COLLAPSED_PCT = 30.0, 0.5, 5.0
"""Points that the right solution must add; the share of them that another hint may add or take; and
the accuracy below which a run has collapsed."""
COLLAPSE = {"hint-result": True, "teacher-live": True, "teacher-frozen": False}
"""Which settings must have collapsed in every seed, and which in none."""


def trials() -> list[Trial]:
    """Every hint, then every teacher, a seed after the other."""
    found: list[Trial] = []
    for seed in SEEDS:
        for name, column in HINTS.items():
            more = {"data.teacher_prompt_key": column}
            if name == "none":
                more["evaluation.before"] = "true"  # of all runs of the seed: the same model
            found.append(Trial("hint", name, seed, CONFIG, SIZE | more))
        found += [
            Trial("teacher", name, seed, CONFIG, SIZE | more) for name, more in TEACHERS.items()
        ]
    return found


def entry(row: dict[str, Any], updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one run says. updates: its rows. leaks: one for each measurement, first to last."""
    measured = [each for each in updates if "leak_update" in each]
    last = updates[-1]
    keys = ("update", "hint_share", "hint_share_error", "right_nats", "wrong_nats")
    return {
        "setting": f"{row['setting']}-{row['method']}",
        "seed": row["seed"],
        "command": row["command"],
        "status": row["status"],
        "accuracy_before_pct": row["summary"]["student_accuracy_before_pct"],
        "accuracy_after_pct": row["summary"]["student_accuracy_after_pct"],
        "leaks": [{key: each[f"leak_{key}"] for key in keys} for each in measured],
        "leak_scored_tokens": sum(each["leak_scored_tokens"] for each in measured),
        "response_tokens": sum(each["num_response_tokens"] for each in updates),
        "last_response_tokens_mean": last["response_tokens_mean"],
        "last_entropy_nats": last.get("entropy_nats"),
        "last_loss": last.get("loss"),
    }


def by_setting(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over seeds of the accuracies, and of the meter's first figures."""
    before = {each["seed"]: each["accuracy_before_pct"] for each in entries}
    before |= {
        each["seed"]: each["accuracy_before_pct"]
        for each in entries
        if each["accuracy_before_pct"] is not None
    }
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(each["setting"] for each in entries):
        own = [each for each in entries if each["setting"] == name]
        first = [each["leaks"][0] for each in own]
        shares = [each["hint_share"] for each in first]
        found[name] = {
            "seeds": [each["seed"] for each in own],
            "accuracy_after_pct": [each["accuracy_after_pct"] for each in own],
            "gain_pct": [each["accuracy_after_pct"] - before[each["seed"]] for each in own],
            "hint_share": shares,
            "hint_share_mean": None if None in shares else mean(shares),
            "hint_share_error": [each["hint_share_error"] for each in first],
            "right_nats": [each["right_nats"] for each in first],
            "wrong_nats": [each["wrong_nats"] for each in first],
            "last_entropy_nats": [each["last_entropy_nats"] for each in own],
            "last_loss": [each["last_loss"] for each in own],
            "last_response_tokens_mean": [each["last_response_tokens_mean"] for each in own],
        }
    return found


def faults(found: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as the page says; of the settings that are there."""
    broken: list[str] = []
    solution, others = found.get("hint-solution"), ("hint-wrong_solution", "hint-style")
    if solution is not None:
        if min(solution["gain_pct"]) < TEACHES_PCT:
            broken.append(f"the right solution adds {solution['gain_pct']} points")
        for name in others:
            if name not in found:
                continue
            other = found[name]
            if max(map(abs, other["gain_pct"])) > OTHERS * min(solution["gain_pct"]):
                broken.append(f"{name} changes accuracy by {other['gain_pct']} points")
            if max(other["hint_share"]) >= min(solution["hint_share"]):
                broken.append(f"{name} has a hint share above that of the right solution")
    none = found.get("hint-none")
    if none is not None and any(share is not None for share in none["hint_share"]):
        broken.append("hints that are not there have a share")
    for name, collapses in COLLAPSE.items():
        if name in found:
            went = [each < COLLAPSED_PCT for each in found[name]["accuracy_after_pct"]]
            if not all(each is collapses for each in went):
                broken.append(f"{name}: {found[name]['accuracy_after_pct']} % after")
    return broken


def measure(
    options: Sequence[str] = (), *, out: Path = OUT, launch: Launch = launch
) -> dict[str, Any]:
    """Run what is missing; what the runs say."""
    parser = argparse.ArgumentParser(prog="python -m studies hints")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name holds it")
    parser.add_argument("--limit", type=int, help="run at most so many of the missing ones")
    parser.add_argument("--dirty", action="store_true", help="record from a tree as it is")
    asked = parser.parse_args(list(options))
    chosen = [trial for trial in trials() if asked.only in trial.name]
    commit = marked_commit if asked.dirty else clean_commit
    rows = run_trials(chosen, out, launch, limit=asked.limit, keep=True, commit=commit)
    entries = [entry(row, updates_of(out / row["name"])) for row in rows]
    found = by_setting(entries)
    missing = [trial.name for trial in trials() if trial.name not in {row["name"] for row in rows}]
    return {
        "config": str(CONFIG),
        "size": SIZE,
        "run_commits": run_commits(rows),
        "missing": missing,
        "settings": found,
        "runs": entries,
        "failed": faults(found),
    }
