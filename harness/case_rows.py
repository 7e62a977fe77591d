"""Cases that run in processes of their own, and the rows that are kept of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.synthetic import write_model
from harness.tree import ROOT
from sglang_bridge.lifetime import PARENT_VARIABLE
from sglang_bridge.server.launch import last_lines

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Tree = dict[str, Any]


def run_program(
    module: str, asked: Mapping[str, Any], own: Path, *, tree: Path = ROOT, limit_s: float
) -> Tree:
    """Run `module` of the project in `tree` on the new directory `own`; returns its figures.

    It reads own/case.json, which is `asked` and the path `out` to write figures to. `own` is
    removed. RuntimeError, with the ends of the logs in it: it failed.
    """
    out = own / "figures.json"
    (own / "case.json").write_text(json.dumps({**asked, "out": str(out)}), encoding="utf-8")
    # -m puts the working directory first, for this process and for all that it starts
    command = [sys.executable, "-m", module, str(own / "case.json")]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment |= {"PYTHONPATH": str(tree), PARENT_VARIABLE: str(os.getpid())}
    with (own / "case.log").open("wb") as output:
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=output, stderr=output, timeout=limit_s
        )
    if done.returncode or not out.exists():
        ends = "\n".join(f"{p.name}:\n{last_lines(p)}" for p in sorted(own.rglob("*.log")))
        raise RuntimeError(f"{module} failed (exit code {done.returncode}):\n{ends}")
    figures = json.loads(out.read_text(encoding="utf-8"))
    shutil.rmtree(own)
    return figures


def fingerprint_of(asked: Any, folder: str, tree: Path = ROOT) -> str:
    """Changes with the project's code in `tree`, that of `folder` (checks/chaos), and `asked`."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    for package in ("megatron_opd", "sglang_bridge", folder):
        for path in sorted((tree / package).rglob("*.py")):
            digest.update(str(path.relative_to(tree)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def own_directory(scratch: Path) -> Path:
    """A new directory for one case."""
    return Path(tempfile.mkdtemp(dir=scratch))


def model_with_tokenizer(path: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """A random model with a tokenizer, which SGLang wants and nobody here uses."""
    write_model(path, config, seed)
    for name in TOKENIZER:
        shutil.copy(ROOT / "examples" / "arithmetic" / "student" / name, path)
    return path


def old_and_new(path: Path, config: Mapping[str, Any]) -> dict[str, Path]:
    """Two random checkpoints of one architecture, in the new directory `path`."""
    path.mkdir()
    return {
        name: model_with_tokenizer(path / name, config, seed)
        for seed, name in enumerate(("old", "new"))
    }


def kept_rows(rows: Path, prints: Mapping[str, str]) -> dict[str, Tree]:
    """The newest row of every case whose fingerprint is still the same."""
    lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    found = {row["name"]: row for row in map(json.loads, lines)}
    return {name: row for name, row in found.items() if row["fingerprint"] == prints.get(name)}


def append_row(rows: Path, row: Tree) -> None:
    """Keep a row."""
    rows.parent.mkdir(parents=True, exist_ok=True)
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, separators=(",", ":")) + "\n")


def say(text: str) -> None:
    """Tell whoever watches how far it is."""
    print(text, file=sys.stderr, flush=True)
