"""Chunks of every target in processes of their own, so that a death is a finding and no end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checks.fuzz.engine import CHUNK, Tally, merged
from checks.fuzz.targets import load_target
from harness.tree import ROOT

WORKER = "checks.fuzz.worker"
Key = tuple[str, int, int]


def run_campaign(
    names: list[str], inputs: int, seed: int, progress: Path | None = None, size: int = CHUNK
) -> dict[str, Any]:
    """`inputs` times its share through each target.

    progress: finished chunks, kept and reused; size: inputs of a chunk, the same in both runs.
    """
    started_s = time.monotonic()
    done = read_progress(progress)
    rows: list[dict[str, Any]] = []
    for name in names:
        chunks = max(1, round(inputs * load_target(name).share / size))
        todo = [chunk for chunk in range(chunks) if (name, seed, chunk) not in done]
        while todo:
            todo = _run(name, seed, todo, size, done, progress)
        tally = merged([done[name, seed, chunk] for chunk in range(chunks)])
        total = tally.refused + tally.accepted + tally.silent + tally.crashes
        rows.append({"target": name, "inputs": total} | asdict(tally))
        print(
            f"{name}: {total} inputs, {tally.crashes} crashes, {tally.silent} silent",
            file=sys.stderr,
        )
    sums: dict[str, int] = defaultdict(int)
    for row in rows:
        for key in ("inputs", "refused", "accepted", "silent", "crashes"):
            sums[key] += row[key]
    return {"seed": seed, **sums, "seconds": round(time.monotonic() - started_s), "targets": rows}


def _run(
    name: str,
    seed: int,
    chunks: list[int],
    size: int,
    done: dict[Key, Tally],
    progress: Path | None,
) -> list[int]:
    """Run `chunks` in one process until it ends or dies; those that are left."""
    numbers = map(str, (seed, size, *chunks))
    command = [sys.executable, "-m", WORKER, name, *numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        number = ""
        for line in process.stdout:
            if line.startswith("{"):
                _keep(json.loads(line), done, progress)
                number = ""
            else:
                number = line.strip()
    left = [chunk for chunk in chunks if (name, seed, chunk) not in done]
    if process.returncode == 0 and not left:
        return []
    if process.returncode >= 0 or not left:
        raise RuntimeError(f"the worker of target {name} ended with {process.returncode}")
    died = Tally(crashes=1)
    died.find(
        "crash",
        f"the process died of signal {-process.returncode}",
        f"chunk {left[0]}, input {number}",
    )
    _keep({"key": [name, seed, left[0]], "tally": asdict(died)}, done, progress)
    return left[1:]


def _keep(row: dict[str, Any], done: dict[Key, Tally], progress: Path | None) -> None:
    name, seed, chunk = row["key"]
    done[name, seed, chunk] = Tally(**row["tally"])
    if progress is not None:
        with progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_progress(path: Path | None) -> dict[Key, Tally]:
    """Finished chunks by (target, seed, chunk); a last line that was cut short is left out."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {tuple(row["key"]): Tally(**row["tally"]) for row in rows}
