"""Brings verifiers: a pretrained model's answers, each judged as its row says, and learnt from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from checks.bring.item import Item, Ran, Tree
from examples.smollm2.settings import BUILD
from harness.tree import ROOT

OWN = "judged:polite"
JUDGE = '''"""A verifier of one's own, with rewards between 0 and 1."""
def polite(response, answer):
    return sum(word in response.lower() for word in answer.split()) / len(answer.split())
'''
BATCH, UPDATES, GROUP = 16, 5, 2
ROWS = Path(__file__).with_name("judged.jsonl")
"""Eight prompts for each verifier, in turn."""


def rows() -> list[Tree]:
    """Return the prompts with their answers and verifiers."""
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def prepare(folder: Path) -> Tree:
    """A run that learns from rewards alone, with a verifier by row."""
    subprocess.run([sys.executable, "-m", "examples.smollm2.models"], check=True)
    (folder / "judged.py").write_text(JUDGE, encoding="utf-8")
    return {
        "run": {"max_steps": UPDATES, "seed": 7},
        "data": {
            "train": str(ROWS),
            "task": OWN,
            "task_key": "judge",
            "chat_template": True,
            "shuffle": False,
        },
        "student": {
            "model": str((ROOT / BUILD / "teacher").absolute()),
            "dtype": "float32",
            "context_length": 256,
            "max_total_tokens": 4096,
            "max_running_requests": BATCH,
        },
        "rollout": {"max_new_tokens": 128, "concurrency": BATCH, "group_size": GROUP},
        "buffer": {"batch_size": BATCH},
        "objective": {"type": "grpo", "trust": {"type": "none"}},
        "learner": {
            "dtype": "float32",
            "threads": 1,
            "max_tokens_per_microbatch": 256,
            "optimizer": {"lr": 1.0e-5},
        },
        "verifier": {"workers": 1, "code": {"enabled": True}},
        "evaluation": {"problems": 0},
        "checkpoint": {"export_hf": False, "every_minutes": 0},
        "metrics": {"rollouts": BATCH, "tensorboard": False},
    }


def show(ran: Ran) -> Tree:
    """Return the rewards by verifier, and what no verifier could judge."""
    judges = {row["prompt"]: row["judge"] for row in rows()}
    rewards: dict[str, list[float]] = {task: [] for task in judges.values()}
    dropped: Counter[str] = Counter()
    for row in ran.rollouts:
        task = next(task for prompt, task in judges.items() if prompt in row["prompt"])
        if row["drop_reason"] is None:
            rewards[task].append(row["reward"])
        else:
            dropped[f"{task}: {row['drop_reason']}"] += 1
    by_task: dict[str, Any] = {
        task: {
            "responses": len(found),
            "mean_reward": round(sum(found) / max(1, len(found)), 3),
            "right": sum(reward == 1 for reward in found),
            "in_between": sum(0 < reward < 1 for reward in found),
        }
        for task, found in rewards.items()
    }
    return {
        "model": "SmolLM2-135M-Instruct",
        "by_verifier": by_task,
        "dropped": dict(dropped),
        "as_asked": all(each["right"] > 0 for each in by_task.values()) and not dropped,
    }


VERIFIERS = Item(
    "verifiers", "math, multiple choice, JSON, code in the sandbox, one's own", prepare, show
)
