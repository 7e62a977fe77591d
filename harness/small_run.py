"""Makes a run of a few updates with the demo's models, on data that its caller brings."""

from __future__ import annotations

import json
from typing import Any

import yaml

from harness.tree import ROOT

Tree = dict[str, Any]
EXAMPLE = ROOT / "examples" / "arithmetic"
UPDATES, BATCH = 6, 16
ROWS = 64
LIMIT = 64


def problems(first: int, count: int = ROWS) -> list[Tree]:
    """Return rows of the demo's training file."""
    lines = (EXAMPLE / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[first : first + count]]
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]


def small(data: Tree, **sections: Tree) -> Tree:
    """Return the demo's configuration, cut to a few updates, with other data."""
    tree: Tree = yaml.safe_load((EXAMPLE / "demo.yaml").read_text(encoding="utf-8"))
    tree["run"] |= {"max_steps": UPDATES}
    tree["data"] = {"task": "arithmetic", **data}
    for role in ("student", "teacher"):
        tree[role]["model"] = str(ROOT / tree[role]["model"])
    tree["rollout"]["max_new_tokens"] = LIMIT
    tree["buffer"]["batch_size"] = BATCH
    tree["evaluation"] = {"problems": 0}
    tree["checkpoint"] = {"export_hf": False}
    tree["metrics"] = {"rollouts": BATCH, "tensorboard": False}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree
