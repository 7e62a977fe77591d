"""The students and their responses: a short run of this project, and what its first one wrote.

The run is examples/smollm2/distil.yaml at a constant learning rate without warm-up, so that the
first updates are as large as later ones, and without evaluation. Its checkpoints after 1, 4 and 16
updates are converted to Hugging Face checkpoints. All is made once and kept in the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.smollm2.evaluate import HELDOUT, complete, load, rendered
from examples.smollm2.models import make_models
from examples.smollm2.settings import BUILD
from harness.case_rows import say
from harness.tree import ROOT
from megatron_opd.data.records import read_records
from studies.prefixes.enumerate.walk import Walk

STALENESSES = (1, 4, 16)
TOKENS = 64  # of a response, at most
WEIGHTS = "model.safetensors"
CONFIG = "examples/smollm2/distil.yaml"
SETTINGS = {
    "evaluation.every": "0",
    "learner.optimizer.lr_scheduler": "constant",
    "learner.optimizer.warmup_steps": "0",
    "checkpoint.keep_last": "5",
    "checkpoint.export_hf": "false",
}
# Checkpoints by count after update 1, then after every fourth: what is wanted of them costs 2 GB.
LEGS = (
    ({"run.max_steps": "1", "checkpoint.every": "1"}, "--overwrite"),
    ({"run.max_steps": "16", "checkpoint.every": "4"}, "--resume"),
)


def commands(directory: Path) -> list[list[str]]:
    """Return the commands of the run, after `python -m megatron_opd`."""
    found = []
    for leg, how in LEGS:
        settings = {"run.dir": str(directory / "run")} | SETTINGS | leg
        pairs = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        found.append(["run", CONFIG, *pairs, how])
    return found


def opd(words: Sequence[str]) -> None:
    """Run a command of this project. CalledProcessError: it failed, and has said why."""
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "megatron_opd", *words]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | environment, stdout=sys.stderr)


def make_students(directory: Path, ages: Sequence[int]) -> dict[str, Path]:
    """Return the current student's checkpoint by updates; "0" is the old student itself."""
    make_models(BUILD)
    found = {"0": BUILD / "student"}
    sources = {n: directory / "run" / "checkpoints" / f"step-{n:06d}" for n in ages}
    wanted = {n: directory / "students" / str(n) for n in ages}
    if not all(path.exists() or sources[n].exists() for n, path in wanted.items()):
        say("training 16 updates")
        for words in commands(directory):
            opd(words)
    for n, path in wanted.items():
        if not path.exists():
            convert(sources[n] / "learner", path)
    return found | {str(n): path for n, path in wanted.items()}


def convert(source: Path, target: Path) -> None:
    """Write a checkpoint of the run as a Hugging Face checkpoint, whole or not at all."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    model = ("--model", str(BUILD / "student"))
    opd(["convert", "megatron-to-hf", str(source), str(partial), *model])
    partial.rename(target)


def weights_hash(path: Path) -> str:
    """Return the first 16 hex digits of the SHA-256 of a checkpoint's weights."""
    with (path / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def make_walks(directory: Path, student: Path) -> list[Walk]:
    """Return one response of the old student to every held-out prompt; sampled once.

    By transformers' generate at temperature 1, without truncation.
    """
    kept = directory / "responses.json"
    if not kept.exists():
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(student)
        asked = [row["prompt"] for row in read_records(HELDOUT, ["prompt"])]
        prompts = rendered(asked, tokenizer)
        say(f"sampling {len(prompts)} responses")
        responses = complete(load(student), prompts, TOKENS, greedy=False)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([prompts, responses]), encoding="utf-8")
    prompts, responses = json.loads(kept.read_text(encoding="utf-8"))
    return [
        Walk(f"response-{index:02d}", prompt, response)
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
