"""The demo as its user sees it: evaluated, recorded, watched in a browser, reported.

    python -m checks watched_demo [--out DIR] [--pictures DIR] [--finished]

Runs examples/arithmetic/watched.yaml (two held-out sets every 10 updates, W&B offline, rollouts
recorded) with an API key of no one. Once half of the updates are done, `opd watch` shows the
running run to a real browser until another update appears by itself; after the run, `opd report`
is written and opened. --pictures: where to write what the browser shows, at desktop and phone
width; `--pictures docs` replaces those of the documentation. --finished: the run is in DIR already,
and is not watched again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks.pictures import report_pictures, watch_pictures
from harness.run_dirs import summary_of
from tests.support.browser import chromium, tab, watching
from tests.support.wandb_files import recorded

CONFIG = Path("examples/arithmetic/watched.yaml")
OUT = Path("runs/watched")
KEY = "0123456789abcdef0123456789abcdef01234567"
"""Has the form of a key of W&B. No file of the run may hold it."""
WATCH_FROM = 25
"""Updates that are done when the page is opened."""
PATIENCE_S = 600.0
FIGURES = ("accuracy_pct", "stderr_pct", "version_min", "version_max", "lag_steps", "seconds")
SENT = (
    *("train/loss", "train/reverse_kl_nats", "rollout/response_tokens_mean"),
    *("perf/tokens_per_s", "weight_sync/pause_s", "teacher/health_topk_overlap"),
    *("eval/short/accuracy_pct", "eval/long/accuracy_pct", "eval/long/pass_at_k/4"),
)
"""Names of which W&B must have values."""
DRAWN = "() => document.querySelector('.chart .uplot')"
"""Charts further down are drawn when they come into view."""


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Run, watch and report; `failed` where something that must be there is missing."""
    parser = argparse.ArgumentParser(prog="python -m checks watched_demo")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--finished", action="store_true")
    given = parser.parse_args(list(options))
    watched = None if given.finished else run_and_watch(given.out, given.pictures)
    report = show_report(given.out, given.pictures)
    summary = summary_of(given.out)
    figures = {
        "status": summary["status"],
        **{key: summary[key] for key in ("wall_s", "updates", "evaluations_skipped")},
        "evaluations": by_set(lines_of(given.out / "evaluations.jsonl")),
        "teacher_accuracy_pct": summary["teacher_accuracy_pct"],
        "rollouts_recorded": len(lines_of(given.out / "rollouts.jsonl")),
        "wandb": wandb_figures(given.out),
        "watch": watched,
        "report": report,
    }
    return figures | {"failed": bool(faults(figures))}


def run_and_watch(out: Path, pictures: Path | None) -> dict[str, Any]:
    """Run it, watch it meanwhile, and wait until it has ended. RuntimeError: it failed."""
    with running(out) as run:
        watched = watch(out, run, pictures)
        if run.wait() != 0:
            raise RuntimeError(f"{CONFIG} failed: see {out}.log")
    return watched


@contextmanager
def running(out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`opd run`, its output beside the run's directory."""
    shutil.rmtree(out, ignore_errors=True)  # rows of an earlier run would be taken for this one's
    out.parent.mkdir(parents=True, exist_ok=True)
    words = ["run", str(CONFIG), "--set", f"run.dir={out}"]
    with out.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_opd", *words],
            env={**os.environ, "WANDB_API_KEY": KEY},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def watch(out: Path, run: subprocess.Popen[bytes], pictures: Path | None) -> dict[str, Any]:
    """Open the page of the running run, and wait until it shows an update that is made later."""
    rows, deadline_s = out / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while not rows.exists() or len(lines_of(rows)) < WATCH_FROM:
        if run.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{CONFIG} ended or hung before it was watched: see {out}.log")
        time.sleep(0.5)
    with watching(out) as address, chromium() as browser, tab(browser) as opened:
        page = opened.page
        begun_s = time.monotonic()
        page.goto(address)
        page.wait_for_selector(".chart canvas")
        shown_s = time.monotonic() - begun_s
        state, first = (page.locator(each).inner_text() for each in ("#state", "#done"))
        page.wait_for_function(
            "(first) => document.getElementById('done').innerText !== first", arg=first
        )
        later = page.locator("#done").inner_text()
        problems = list(opened.problems)
        if pictures is not None:
            problems += watch_pictures(browser, address, pictures / "_static")
    return {
        "state": state,
        "shown_s": round(shown_s, 2),
        "first_seen": first,
        "then_by_itself": later,
        "console_problems": problems,
    }


def show_report(out: Path, pictures: Path | None) -> dict[str, Any]:
    """Write the report, and open it."""
    page_file = out.with_suffix(".html")
    command = [sys.executable, "-m", "megatron_opd", "report", str(out), "-o", str(page_file)]
    begun_s = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    written_s = time.monotonic() - begun_s
    with chromium() as browser, tab(browser) as opened:
        begun_s = time.monotonic()
        opened.page.goto(page_file.absolute().as_uri())
        opened.page.wait_for_function(DRAWN)
        opened_s = time.monotonic() - begun_s
        problems = list(opened.problems)
        if pictures is not None:
            problems += report_pictures(browser, page_file.absolute().as_uri(), pictures)
    return {
        "bytes": page_file.stat().st_size,
        "written_s": round(written_s, 2),
        "opened_s": round(opened_s, 2),
        "console_problems": problems,
    }


def by_set(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return {set: {update: figures}}."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        figures = {key: rounded(row[key]) for key in FIGURES}
        found.setdefault(row["set"], {})[str(row["update"])] = figures
    return found


def wandb_figures(out: Path) -> dict[str, Any]:
    """Return what the offline run of W&B holds, which files hold the key, and what it lacks."""
    (attempt,) = recorded(out)
    names = {name for row in attempt["rows"] for name in row}
    return {
        "project": attempt["project"],
        "rows": len(attempt["rows"]),
        "names": len(names),
        "missing": sorted(set(SENT) - names),
        "files_with_the_key": holding(out, KEY),
    }


def holding(folder: Path, text: str) -> list[str]:
    """Return the files below a directory that hold `text`."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [str(path.relative_to(folder)) for path in files if text.encode() in path.read_bytes()]


def faults(figures: Mapping[str, Any]) -> list[str]:
    """Return what must not be."""
    sets, wandb = figures["evaluations"], figures["wandb"]
    watch, report = figures["watch"], figures["report"]
    wrong = {
        "not finished": figures["status"] != "finished",
        "a set without a course": any(len(each) < 3 for each in sets.values()) or len(sets) < 2,
        "W&B lacks a figure": bool(wandb["missing"]),
        "a file holds the key": bool(wandb["files_with_the_key"]),
        "no rollouts": figures["rollouts_recorded"] == 0,
        "not watched while it ran": watch is not None and watch["state"] != "running",
        "a page complained": any(page["console_problems"] for page in (watch, report) if page),
    }
    return [what for what, so in wrong.items() if so]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file; its last line may be torn."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def rounded(value: float | None) -> float | None:
    """Return a figure with two decimals."""
    return None if value is None else round(value, 2)
