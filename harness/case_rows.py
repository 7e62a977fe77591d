"""Cases that run in processes of their own, and the rows that are kept of them."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.synthetic import write_model
from harness.tree import ROOT, is_dirty
from megatron_opd.metrics.summary import commit
from sglang_bridge.lifetime import PARENT_VARIABLE, die_with_parent
from sglang_bridge.server.launch import last_lines

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Tree = dict[str, Any]


def case_parser(program: str) -> argparse.ArgumentParser:
    """Options that say which cases of `program` are run: --only WORD, --limit N."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name holds it")
    parser.add_argument("--limit", type=int, help="run at most so many of the missing cases")
    return parser


def run_missing(
    prints: Mapping[str, str], run: Callable[[str], Tree], rows: Path, limit: int | None = None
) -> dict[str, Tree]:
    """The rows of cases by name: those that are kept, and those that are made now.

    prints: fingerprints by name. run: returns what a case's row holds besides its name,
    fingerprint, commit and seconds. limit: how many are made at most.
    """
    kept = kept_rows(rows, prints)
    for name in [name for name in prints if name not in kept][:limit]:
        began = time.monotonic()
        row = {"name": name, "fingerprint": prints[name], "commit": commit(), **run(name)}
        row["seconds"] = time.monotonic() - began
        append_row(rows, row)
        kept[name] = row
        say(f"{len(kept)}/{len(prints)} {name}: {row['seconds']:.0f} s")
    return kept


def run_program(module: str, asked: Mapping[str, Any], own: Path, *, limit_s: float) -> Tree:
    """Run `module` of the project on the new directory `own`; returns its figures.

    It reads own/case.json, which is `asked` and the path `out` to write figures to. `own` is
    removed. RuntimeError, with the ends of the logs in it: it failed.
    """
    out = own / "figures.json"
    (own / "case.json").write_text(json.dumps({**asked, "out": str(out)}), encoding="utf-8")
    # -m puts the working directory first, for this process and for all that it starts
    command = [sys.executable, "-m", module, str(own / "case.json")]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment |= {"PYTHONPATH": str(ROOT), PARENT_VARIABLE: str(os.getpid())}
    with (own / "case.log").open("wb") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=limit_s
        )
    if done.returncode or not out.exists():
        ends = "\n".join(f"{p.name}:\n{last_lines(p)}" for p in sorted(own.rglob("*.log")))
        raise RuntimeError(f"{module} failed (exit code {done.returncode}):\n{ends}")
    figures = json.loads(out.read_text(encoding="utf-8"))
    shutil.rmtree(own)
    return figures


def case_main(run: Callable[[Tree, Path], Coroutine[Any, Any, Tree]]) -> None:
    """What a module does that `run_program` runs: `run` the case, and write its figures."""
    die_with_parent()
    file = Path(sys.argv[1])
    asked: Tree = json.loads(file.read_text(encoding="utf-8"))
    figures = asyncio.run(run(asked, file.parent))
    Path(asked["out"]).write_text(json.dumps(figures), encoding="utf-8")


def fingerprint_of(asked: Any, folder: str) -> str:
    """Changes with the project's code, that of `folder` (checks/chaos), and `asked`."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    for package in ("megatron_opd", "sglang_bridge", "harness", folder):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
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


def kept_rows(rows: Path, prints: Mapping[str, str], *, clean: bool = False) -> dict[str, Tree]:
    """The newest row of every case whose fingerprint is still the same, in the order of `prints`.

    clean: rows of trees that differed from their commit do not count.
    """
    found = {row["name"]: row for row in recorded(rows) if not (clean and is_dirty(row))}
    return {
        name: found[name]
        for name in prints
        if name in found and found[name].get("fingerprint") == prints[name]
    }


def recorded(rows: Path) -> list[Tree]:
    """Every row, oldest first."""
    lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    return [json.loads(line) for line in lines]


def run_commits(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The commits that rows were made at: what was stopped may have several."""
    return sorted({str(row["commit"]) for row in rows})


def append_row(rows: Path, row: Tree) -> None:
    """Keep a row."""
    rows.parent.mkdir(parents=True, exist_ok=True)
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, separators=(",", ":")) + "\n")


def say(text: str) -> None:
    """Tell whoever watches how far it is."""
    print(text, file=sys.stderr, flush=True)
