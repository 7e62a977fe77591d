"""`make demo-real`: a pretrained model loses layers and recovers by on-policy distillation.

python -m examples.smollm2.demo

Fetches and converts the teacher, prunes the student, measures it on held-out prompts, trains it
with `opd run`, measures it again, prints both side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.smollm2.memory import PeakMemory
from examples.smollm2.settings import BUILD, REMOVED_LAYERS, RUN
from harness.header import machine
from megatron_opd.metrics.summary import commit, versions

HERE = Path(__file__).resolve().parent
TEACHER_TEXTS = BUILD / "teacher_texts.json"
DENSE_BYTES = 64 * 12
"""A token in a cache of 64 draws that keeps equal ids repeatedly: id and two log-probs each."""
ROWS = (
    ("reverse KL to the teacher, nats a token", "reverse_kl_nats", "{:.3f}"),
    ("greedy tokens that agree with the teacher's", "greedy_agreement", "{:.1%}"),
    ("perplexity of teacher-written text", "teacher_text_perplexity", "{:.2f}"),
)
FACTS = (
    "student_accuracy_before_pct",
    "student_accuracy_after_pct",
    "teacher_accuracy_pct",
)


ENVIRONMENT = {
    "TQDM_DISABLE": "1",  # transformers' progress bars
    # without it the evaluation's threads spin while other programs hold a core
    "OMP_WAIT_POLICY": "passive",
}


def python(*words: str) -> None:
    """Run a program of this project. Raises CalledProcessError when it fails."""
    subprocess.run([sys.executable, *words], check=True, env={**os.environ, **ENVIRONMENT})


@contextmanager
def step(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Say what is done and how long it took."""
    print(f"{name} ...", flush=True)
    started = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - started, 1)
    print(f"{name}: {seconds[name]:.0f} s", flush=True)


def evaluate(student: Path, out: Path) -> dict[str, Any]:
    """Measure a student on the held-out prompts."""
    options = {"student": student, "teacher": BUILD / "teacher", "out": out}
    options["texts"] = TEACHER_TEXTS
    words = [word for name, path in options.items() for word in (f"--{name}", str(path))]
    python("-m", "examples.smollm2.evaluate", *words)
    return json.loads(out.read_text(encoding="utf-8"))


def measure() -> dict[str, Any]:
    """Do every step and return what is recorded of it."""
    seconds: dict[str, float] = {}
    with PeakMemory() as memory:
        with step("models", seconds):
            python("-m", "examples.smollm2.models")
        TEACHER_TEXTS.unlink(missing_ok=True)
        with step("evaluation before", seconds):
            before = evaluate(BUILD / "student", BUILD / "before.json")
        with step("training", seconds):
            run = ("-m", "megatron_opd", "run", str(HERE / "distil.yaml"), "--overwrite")
            python(*run)
        with step("evaluation after", seconds):
            after = evaluate(RUN / "checkpoints" / "final", BUILD / "after.json")
    summary = json.loads((RUN / "summary.json").read_text(encoding="utf-8"))
    evaluations = (RUN / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "benchmark": "demo_real",
        "command": "make demo-real",
        "machine": machine(),
        "commit": commit(),
        "versions": versions(),
        "removed_layers": REMOVED_LAYERS,
        "seconds": seconds | {"all": round(sum(seconds.values()), 1)},
        "peak_pss_bytes": memory.peak_bytes,
        "before": before,
        "after": after,
        "evaluations": [json.loads(row) for row in evaluations],
        "dense_cache_bytes_per_token": DENSE_BYTES,
        "summary": summary,
    }


def line(text: str) -> str:
    """Return an answer in one line."""
    return " ".join(text.split())


def lines(recorded: dict[str, Any]) -> list[str]:
    """Return what is printed: the answers, the table, the draw cache, time and memory."""
    before, after = recorded["before"], recorded["after"]
    said: list[str] = []
    for first, last in zip(before["answers"], after["answers"], strict=True):
        said += [f"\nprompt           {first['prompt']}"]
        said += [f"teacher          {line(first['teacher'])}"]
        said += [f"student before   {line(first['student'])}"]
        said += [f"student after    {line(last['student'])}"]
    said += ["", f"{'held-out prompts':<46}{'before':>10}{'after':>10}"]
    for title, key, form in ROWS:
        said.append(f"{title:<46}{form.format(before[key]):>10}{form.format(after[key]):>10}")
    summary = recorded["summary"]
    first, last, teacher = (f"{summary[key]:.1f}%" for key in FACTS)
    said.append(f"{'questions of fact answered rightly':<46}{first:>10}{last:>10}")
    said.append(
        f"(that text has a perplexity of {before['teacher_perplexity']:.2f} to the teacher, which "
        f"answers {teacher} of the questions)"
    )
    kept = summary["cache_bytes_per_token"]
    said += [
        f"\ndraw cache: {summary['distinct_ids_per_token']:.1f} distinct ids of 64 draws, "
        f"{kept:.0f} bytes a token, a dense cache {DENSE_BYTES} ({DENSE_BYTES / kept:.1f}x)",
        f"{recorded['seconds']['all'] / 60:.1f} minutes, at most "
        f"{recorded['peak_pss_bytes'] / 1e9:.1f} GB of memory (PSS)",
        f"recorded: {RUN / 'result.json'}; the student: {RUN / 'checkpoints' / 'final'}",
    ]
    return said


def main() -> int:
    """Entry point."""
    try:
        recorded = measure()
    except subprocess.CalledProcessError as error:
        print(f"demo-real: this step failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    (RUN / "result.json").write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")
    print("\n".join(lines(recorded)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
