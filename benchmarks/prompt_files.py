"""What a large file of prompts costs a run: memory of its controller, and seconds of its start.

    python -m benchmarks prompt_files [--gb 2]

Every case is a real `opd run` of the demo's models, of a few updates. Files have `--gb` of rows of
100 bytes, 1 kB and 100 kB; each row has a prompt of the demo and a column that nobody reads, which
is what many data sets have most of. peak_bytes: the most resident memory of the `opd run` process
alone (VmHWM), servers and learner not included. start_s: from its beginning until it has read its
data, which is when it opens its directory. extra: beside a run on 1,000 rows in the same call;
`within` is the aim, at most 1 GB and 10 s.

The control is a file of 24 MB of short rows that is read as a whole before the run, as all files
once were, beside the same file read as large ones are: four times its size must be seen at least.
Both import more than `opd run` does, so they stand beside each other alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.case_rows import say
from harness.run_dirs import summary_of
from harness.small_run import problems, small

UPDATES = 6
AIM_BYTES, AIM_S = 10**9, 10.0
CONTROL_BYTES = 24 * 10**6
LIMIT_S = 600.0
BLOCK_BYTES = 2**22
START = """
import sys
from megatron_opd.inputs import prepare
from megatron_opd.cli.main import main
prepare.WHOLE_BYTES = int(sys.argv[1])
sys.exit(main(["run", sys.argv[2]]))
"""
DRAWN, WHOLE = 0, 2**60
Tree = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One file and how it is read. whole_bytes: None as a run decides; it reads smaller ones first.

    size: bytes of the file, 0 for 1,000 rows of that length.
    """

    name: str
    row_bytes: int
    size: int
    whole_bytes: int | None = None


def measure(options: Sequence[str] = ()) -> Tree:
    """Run every case; `failed` where the aim is missed or the control shows nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prompt_files")
    parser.add_argument("--gb", type=float, default=2.0, help="gigabytes of each large file")
    given = parser.parse_args(list(options))
    size = int(given.gb * 1e9)
    cases = (
        Case("1,000 rows", 1000, 0),
        *(Case(f"{given.gb:g} GB, rows of {row} bytes", row, size) for row in (100, 1000, 100_000)),
        Case("24 MB read when drawn", 100, CONTROL_BYTES, DRAWN),
        Case("24 MB read as a whole", 100, CONTROL_BYTES, WHOLE),
    )
    with tempfile.TemporaryDirectory(prefix="opd-prompt-files-") as folder:
        found = {case.name: run_case(case, Path(folder)) for case in cases}
    base = found["1,000 rows"]
    for row in found.values():
        row["extra_bytes"] = row["peak_bytes"] - base["peak_bytes"]
        row["extra_start_s"] = row["start_s"] - base["start_s"]
    large = [found[case.name] for case in cases if case.size == size]
    within = all(row["extra_bytes"] <= AIM_BYTES and row["extra_start_s"] <= AIM_S for row in large)
    drawn, whole = (found[case.name]["peak_bytes"] for case in cases[-2:])
    seen = whole - drawn > 4 * CONTROL_BYTES
    return {
        "cases": found,
        "within": within,
        "control_seen": seen,
        "failed": not (within and seen),
    }


def run_case(case: Case, folder: Path) -> Tree:
    """Make the file, run on it, remove it. RuntimeError: the run failed."""
    own = folder / "case"
    own.mkdir()
    rows = write_rows(own / "train.jsonl", case)
    tree = small({"train": str(own / "train.jsonl"), "max_bad_fraction": 0.0})
    tree["run"] |= {"dir": str(own / "run"), "max_steps": UPDATES}
    config, log = own / "config.yaml", own / "run.log"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_opd", "run", str(config)]
    if case.whole_bytes is not None:
        command = [sys.executable, "-c", START, str(case.whole_bytes), str(config)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        start_s, peak = watch(process, own / "run" / "config.resolved.yaml", began)
    if process.returncode:
        raise RuntimeError(f"{case.name} failed: {log.read_text(errors='replace')[-2000:]}")
    summary = summary_of(own / "run")
    row = {
        "rows": rows,
        "file_bytes": (own / "train.jsonl").stat().st_size,
        "peak_bytes": peak,
        "start_s": round(start_s, 2),
        "seconds": round(time.monotonic() - began, 1),
        "updates": summary["updates"],
        "prompts_skipped": summary["prompts_skipped"],
        "data_epochs": summary["data_epochs"],
    }
    shutil.rmtree(own)
    say(f"{case.name}: {row}")
    return row


def write_rows(path: Path, case: Case) -> int:
    """Write a file; returns its rows."""
    texts = [json.dumps(row)[:-1] for row in problems(0)]
    lines = [f'{t}, "solution": "{"x" * (case.row_bytes - len(t) - 18)}"}}\n' for t in texts]
    if not case.size:
        path.write_text("".join(lines[n % len(lines)] for n in range(1000)))
        return 1000
    block = "".join(lines)
    times = max(1, BLOCK_BYTES // len(block))
    block, each = (block * times).encode(), times * len(lines)
    count = -(-case.size // len(block))
    with path.open("wb") as file:
        for _ in range(count):
            file.write(block)
    return count * each


def watch(process: subprocess.Popen[bytes], opened: Path, began: float) -> tuple[float, int]:
    """Return when the run opened its directory, and the peak of its resident memory, at its end."""
    start_s, peak, status = None, 0, Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        if time.monotonic() - began > LIMIT_S:
            process.kill()
        if start_s is None and opened.exists():
            start_s = time.monotonic() - began
        lines = [line.split() for line in status.read_text().splitlines()]
        peak = max(peak, *(int(line[1]) * 1024 for line in lines if line[0] == "VmHWM:"), 0)
        time.sleep(0.02)
    return start_s or float("inf"), peak
