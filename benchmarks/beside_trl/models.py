"""The pretrained pair of `make demo-real`, with end tokens that are never sampled.

Every response then has exactly the tokens that are asked for, in both systems: a response that
ended early would cost a batch of TRL's nothing less, and a server of ours less.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from examples.smollm2.models import make_models
from examples.smollm2.settings import BUILD

Tree = dict[str, Any]

OUT = Path("build/beside_trl")
NEVER = "<empty_output>"
"""A token that the tokenizer reserves and that occurs in no text."""
WEIGHTS = "model.safetensors"
FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


def endless_pair(out: Path = OUT) -> dict[str, Path]:
    """Return directories of student and teacher, made unless they are there."""
    make_models(BUILD)
    return {name: endless(BUILD / name, out / name) for name in ("student", "teacher")}


def endless(source: Path, target: Path) -> Path:
    """Copy a checkpoint to `target` with another end token; the weights become a hard link."""
    made = target / FILES[-1]
    if made.exists() and (target / WEIGHTS).samefile(source / WEIGHTS):
        return target
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    for path in source.iterdir():
        if path.name == WEIGHTS:
            (target / WEIGHTS).unlink(missing_ok=True)
            (target / WEIGHTS).hardlink_to(path)
        elif path.name not in FILES:
            shutil.copy(path, target)
    for name in FILES:
        tree = json.loads((source / name).read_text(encoding="utf-8"))
        tree = with_end(tree, NEVER, id_of(tokenizer, NEVER))
        (target / name).write_text(json.dumps(tree, indent=2), encoding="utf-8")
    return target


def id_of(tokenizer: Tree, token: str) -> int:
    """Return the id of a token that a tokenizer.json adds. KeyError: it adds no such one."""
    return {added["content"]: added["id"] for added in tokenizer["added_tokens"]}[token]


def with_end(tree: Tree, token: str, number: int) -> Tree:
    """Return a configuration whose end token, by name or by number, is another one."""
    changed = {"eos_token": token, "eos_token_id": number}
    return tree | {key: value for key, value in changed.items() if key in tree}
