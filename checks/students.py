"""Which families a learner trains as transformers would, in every layout, and how far they learn.

    python -m checks students > new.json && mv new.json benchmarks/results/students.json
    python tools/pages.py

A tiny random checkpoint of each family (tests/support/students.py), float32:

- forward: the largest |logit - transformers'| of packed segments, at one rank and at two of each
  layout; every tensor comes back bit for bit, also through a checkpoint of Megatron's. Control:
  each tensor in turn is changed by 5 % in transformers, and must show more;
- update: one rank's first update against float64 autograd and torch's AdamW; the largest part of a
  tensor's movement that is wrong;
- layouts: two updates of each layout against one rank's; with experts also where experts are given;
- distil: `opd run` on real servers, from a student with noise on every weight. The reverse KL of
  the first and the last updates; control: the same run with a learning rate of nothing.

With --only NAME... those rows are measured, beside the record's others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness.header import header
from harness.tree import ROOT
from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.to_megatron import hf_to_megatron
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import ModelSpec, read_model_spec
from tests.dist import family_jobs
from tests.dist.caches import make_batch, oracle_update, random_experts, with_experts
from tests.dist.layouts import ADAM, LAYOUTS, gaps, run, weights, wrong_part
from tests.dist.worlds import run_world
from tests.e2e.runs import write_config, write_prompts
from tests.e2e.weight_sync import perturbed_copy
from tests.support.family_errors import each_changed
from tests.support.figures import relative
from tests.support.students import STUDENTS, Student

RECORD = "benchmarks/results/students.json"
LIMITS = {"logits": 2e-5, "update": 1e-2, "layouts": 1e-5, "replayed": 1e-5}
LEARNS = 0.8
"""Of the first updates' divergence, the most that may be left at the end; the control's least."""
FORWARD = ("one rank", "tp2", "tp2 ep2", "dp2 ep2", "pp2")
DISTIL = {"updates": 24, "lr": 3e-3, "noise": 0.3, "ends": 4, "tokens": 24, "batch": 16}
STILL_LR = 1e-12
SHARE = 0.05
"""By how much tensors change; a bias that only chooses experts by ten times that."""


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Every family's figures, a row as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m checks students")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*STUDENTS], default=[])
    only = parser.parse_args(options).only
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    if only:
        record = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
        rows = {row["name"]: row for row in record["students"]}
    for name in only or STUDENTS:
        with tempfile.TemporaryDirectory() as scratch:
            rows[name] = measured(name, STUDENTS[name], Path(scratch))
        print(json.dumps(rows[name]), file=sys.stderr, flush=True)
    students = [rows[name] for name in STUDENTS if name in rows]
    failed = [f"{row['name']}: {', '.join(row['failed'])}" for row in students if row["failed"]]
    return {"distil": DISTIL, "limits": LIMITS, "students": students, "failed": failed}


def measured(name: str, student: Student, base: Path) -> dict[str, Any]:
    """The row of one family."""
    model = student.make(base / "model", seed=student.seed, head_std=1.0, **student.fields)
    spec = read_model_spec(model)
    row: dict[str, Any] = {
        "name": name,
        "architecture": spec.family.architecture,
        "commit": header("checks", "students", [name])["commit"],
        **forward(model, spec, student, base),
        **updates(model, spec, student, base),
        "distil": distil(model, base / "learns", DISTIL["lr"]),
        "still": distil(model, base / "still", STILL_LR),
    }
    return row | {"failed": failures(row)}


def failures(row: dict[str, Any]) -> list[str]:
    """What a row's figures do not keep to."""
    found = [f"{key}: {row[key]}" for key, most in LIMITS.items() if not (row[key] or 0) <= most]
    if not row["least_seen"] >= 4 * row["logits"]:
        found.append(f"a tensor may change unseen: {row['least_seen']}")
    (first, last), (still, end) = row["distil"], row["still"]
    if not (last <= LEARNS * first and end > LEARNS * still):
        found.append(f"distil: {row['distil']}, without learning {row['still']}")
    return found


def forward(model: Path, spec: ModelSpec, student: Student, base: Path) -> dict[str, Any]:
    """Logits against transformers', and what the least telling tensor would change."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = family_jobs.logits_alone(reference)
    family_jobs.write_expected(model, expected)
    etp = 1 if spec.family.expert_biases else None
    hf_to_megatron(
        model,
        model / "megatron0",
        parallel=ParallelConfig(tp=2, pp=2, etp=etp),
        dtype=None,
        crew=Crew(),
        unit_bytes=100_000,
    )
    errors: dict[str, float] = {}
    for layout in FORWARD:
        if layout == "one rank" or layout in student.layouts:
            parallel, ranks = LAYOUTS[layout].parallel, LAYOUTS[layout].ranks
            out = base / f"forward {layout}"
            chosen = {layout: model}
            job = family_jobs.check_families
            errors |= run_world(job, ranks, out, models=chosen, parallel=parallel)
    changes = {
        tensor: float((family_jobs.logits_alone(reference) - expected).abs().max())
        for tensor in each_changed(reference, SHARE)
    }
    least = min(changes, key=changes.__getitem__)
    return {
        "logits": max(errors.values()),
        "conversion": "bitwise",  # check_families raises where it is not
        "least_seen": changes[least],
        "least_seen_tensor": least,
    }


def updates(model: Path, spec: ModelSpec, student: Student, base: Path) -> dict[str, Any]:
    """The first update against float64, and two of each layout against one rank's."""
    batches = [make_batch(model, samples=4, seed=7 + i, vocab=512, update=i) for i in range(2)]
    one, found = base / "one", dict[str, float]()
    metrics = run(LAYOUTS["one rank"], "packed", model, batches, one)
    exact = oracle_update(model, batches[0], lr=ADAM["lr"], eps=ADAM["eps"], clip=ADAM["clip_grad"])
    ours, before = weights(one, 0), load_file(model / "model.safetensors")
    assert exact.weights.keys() == ours.keys() == before.keys()
    wrong = [wrong_part(before[key], ours[key], value) for key, value in exact.weights.items()]
    for layout in student.layouts:
        out = base / f"update {layout}"
        theirs = run(LAYOUTS[layout], "packed", model, batches, out)
        found[layout] = max(gaps(theirs, out, metrics, one).values())
    return {
        "update": max(wrong),
        "grad_norm": relative(metrics[0]["grad_norm"], exact.grad_norm),
        "layouts": max(found.values()),
        "by_layout": found,
        "replayed": replayed(model, spec, student, base, batches) if spec.is_moe else None,
    }


def replayed(
    model: Path, spec: ModelSpec, student: Student, base: Path, batches: list[Any]
) -> float:
    """The same where random experts are given, one layout against one rank."""
    shape = sum(spec.moe_layers), spec.num_experts, spec.experts_per_token
    given = [with_experts(batch, random_experts(batch, 11, shape)) for batch in batches]
    outs = [base / f"replayed {name}" for name in ("one", "two")]
    one = run(LAYOUTS["one rank"], "replayed", model, given, outs[0])
    two = run(LAYOUTS[student.layouts[0]], "replayed", model, given, outs[1])
    return max(gaps(two, outs[1], one, outs[0]).values())


def distil(model: Path, base: Path, lr: float) -> list[float]:
    """The reverse KL, nats a token, of the first and the last updates of a run."""
    base.mkdir()
    (base / "teacher").symlink_to(model)
    perturbed_copy(model, base / "student", scale=DISTIL["noise"], seed=5)
    write_prompts(base)
    config = write_config(
        base,
        base,
        run={"max_steps": DISTIL["updates"]},
        rollout={"max_new_tokens": DISTIL["tokens"]},
        buffer={"batch_size": DISTIL["batch"]},
        learner={"optimizer": {"lr": lr}},
    )
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_opd", "run", str(config)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"opd run ended with {ended.returncode}: {ended.stdout[-2000:]}")
    text = (base / "run/metrics.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line)["reverse_kl_nats"] for line in text.splitlines()]
    ends = DISTIL["ends"]
    return [sum(part) / ends for part in (found[:ends], found[-ends:])]
