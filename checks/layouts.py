"""How far every parallel layout's updates are from one rank's.

    python -m checks layouts > benchmarks/results/layouts.json && python tools/layout_table.py

The layouts and what is varied in them: tests/dist/layouts.py, which the tests run a part of.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.dist.caches import make_batch, random_experts, with_experts
from tests.dist.layouts import LAYOUTS, VARIANTS, gaps, possible, run
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

UPDATES = 3
EXPERTS = (4, 4, 2)  # layers, experts and experts a token of the tiny Qwen3-MoE


def cases() -> Iterator[tuple[str, str, str]]:
    """(model, layout, variant), each variant's one rank first."""
    for model in ("dense", "moe"):
        for variant in VARIANTS:
            for name, layout in LAYOUTS.items():
                sparse_only = variant in ("balanced", "replayed") or not layout.dense
                if (model == "moe" or not sparse_only) and possible(layout, variant):
                    yield model, name, variant


def measure() -> dict[str, Any]:
    """Every case's figures, about 150 small worlds."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        models = {
            "dense": tiny_qwen3(base / "dense", seed=3, num_hidden_layers=4),
            "moe": tiny_qwen3_moe(base / "moe", seed=4, num_hidden_layers=4),
        }
        batches = {
            kind: [
                make_batch(path, samples=8, seed=7 + update, vocab=512, update=update)
                for update in range(UPDATES)
            ]
            for kind, path in models.items()
        }
        routed = [
            with_experts(batch, random_experts(batch, 11, EXPERTS)) for batch in batches["moe"]
        ]
        reference: Any = None
        for model, name, variant in cases():
            out = base / f"{model}-{name}-{variant}"
            chosen = routed if variant == "replayed" else batches[model]
            figures = run(LAYOUTS[name], variant, models[model], chosen, out)
            if name == "one rank":
                reference = (figures, out)
                continue
            worst = gaps(figures, out, *reference)
            rows.append({"model": model, "layout": name, "variant": variant} | worst)
            print(model, name, variant, worst, file=sys.stderr, flush=True)
    return {"updates": UPDATES, "rows": rows}
