"""A run on real engines, at tiny scale, for each thing that a user brings: data and verifiers.

    python -m checks bring [--only NAME ...] [--out DIR]

Each item writes its files and its configuration below DIR, runs `opd run` on them with every
sample recorded, and tells what the run showed. `as_asked` says whether that is what was asked for.
The items of data take the demo's models; `verifiers` takes SmolLM2-135M-Instruct, which it fetches
(92 MB, examples/smollm2). Learning is not the point: a few updates each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from checks.bring.data import DATA
from checks.bring.item import Item, Ran
from checks.bring.verifiers import VERIFIERS

OUT = Path("runs/bring")
ITEMS: dict[str, Item] = {item.name: item for item in (*DATA, VERIFIERS)}


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Run the items; `failed` where one is not as asked."""
    parser = argparse.ArgumentParser(prog="python -m checks bring")
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=list(ITEMS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(list(options))
    rows = {name: run_item(ITEMS[name], given.out) for name in given.only}
    return {"items": rows, "failed": not all(row["as_asked"] for row in rows.values())}


def run_item(item: Item, out: Path) -> dict[str, Any]:
    """Run one item in a directory of its own. RuntimeError: the run failed."""
    folder = (out / item.name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tree = item.prepare(folder)
    tree["run"]["dir"] = str(folder / "run")
    config, log = folder / "config.yaml", folder / "run.log"
    config.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    begun_s = time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_opd", "run", str(config)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{item.name} failed: {log.read_text(errors='replace')[-2000:]}")
    row = {
        "what": item.what,
        "command": f"python -m checks bring --only {item.name}",
        "seconds": round(time.monotonic() - begun_s, 1),
        **item.show(Ran(folder)),
    }
    print(f"{item.name}: {row}", file=sys.stderr, flush=True)
    return row
