"""Whether a server of two ranks computes with what it was sent, for every family of students.

    python -m checks synced > new.json && mv new.json benchmarks/results/synced.json
    python tools/pages.py

A tiny random checkpoint of each family (tests/support/students.py), float32: a server loads it, is
sent other weights, the first ones again, and so on, by every transport. Its digests must be those
of what was sent, its scores those of the same weights as loaded or sent before, bit for bit, and
transformers' within a limit. Control: the other weights' scores differ.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_opd.models.spec import read_model_spec
from tests.e2e.conftest import running, tiny_spec
from tests.e2e.ways import RANKS, every_way
from tests.support.students import STUDENTS, Student

WIDE = {"shared_expert_intermediate_size": 128}
SIZES: Mapping[str, Mapping[str, int]] = {"qwen2_moe": WIDE, "qwen3_5_moe_text": WIDE}
"""On a CPU SGLang pads a rank's part of a feed-forward layer to 64 numbers, which weight syncs
refuse: published sizes are multiples, some tiny ones are not."""
LIMIT_NATS, MOVES_NATS = 2e-5, 0.1
"""The largest error of a family, and how far the other weights' scores are at least."""


def measure() -> dict[str, Any]:
    """A row for each family, shown as it comes."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, student in STUDENTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(measured(name, student, Path(scratch)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    failed = [f"{row['name']}: {row['failed']}" for row in rows if row["failed"]]
    return {"tp": RANKS.tp, "limit_nats": LIMIT_NATS, "students": rows, "failed": failed}


def measured(name: str, student: Student, base: Path) -> dict[str, Any]:
    """The row of one family."""
    fields = {**student.fields, **SIZES.get(name, {})}
    model = student.make(base / "model", seed=student.seed, **fields)
    (base / "weights").mkdir()
    spec = tiny_spec(model, "student", tp=RANKS.tp, weights_dir=str(base / "weights"))
    with running(spec, base / "log") as server:
        found = every_way(server, model, base)
    failed = ""
    if not found.nats <= LIMIT_NATS:
        failed = f"{found.nats:.2g} nats from transformers"
    elif any(found.by_way.values()):
        failed = f"not bit for bit: {found.by_way}"
    elif not found.moved > MOVES_NATS:
        failed = f"other weights are only {found.moved:.2g} nats away"
    return {
        "name": name,
        "architecture": read_model_spec(model).family.architecture,
        "nats": found.nats,
        "moved_nats": found.moved,
        "by_way": found.by_way,
        "failed": failed,
    }
