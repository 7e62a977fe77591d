"""The log-prob operation of the loss at real sizes: fused kernels, blocks, and dense logits.

products: the three matrix products that no way can do without, as the floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.lean_logp import Inputs, Size, dense, lean, lean_eager, products
from checks.gpu.timing import or_out_of_memory, timed

VOCAB = 151_936
SIZES = (  # heads of 1.7 B and 30 B models; the wider one leaves dense logits no room on 80 GB
    Size(16_384, VOCAB, 2048, 8, "bfloat16"),
    Size(16_384, VOCAB, 4096, 8, "bfloat16"),
    Size(16_384, VOCAB, 2048, 64, "bfloat16"),  # what pairs cost
)
DRY_SIZES = (Size(64, 4096, 64, 8, "float32"),)
PATHS: dict[str, Callable[[Inputs], None]] = {
    "lean": lean,
    "lean_eager": lean_eager,
    "products": products,
    "dense": dense,
}
REPEATS = 5


def measure(limit_s: float, *, dry: bool) -> dict[str, Any]:
    """Milliseconds of forward and backward by size and path."""
    device = "cpu" if dry else "cuda"
    return {"sizes": [_size(size, device) for size in (DRY_SIZES if dry else SIZES)]}


def _size(size: Size, device: str) -> dict[str, Any]:
    inputs = Inputs(size, device)
    figures: dict[str, Any] = {}
    for name, path in PATHS.items():

        def call(path: Callable[[Inputs], None] = path) -> None:
            inputs.hidden_TH.grad = None
            path(inputs)

        figures[name] = or_out_of_memory(lambda call=call: timed(call, device, REPEATS))
        print(size, name, figures[name], flush=True)
    return asdict(size) | figures | {"of_products": _ratio(figures)}


def _ratio(figures: dict[str, Any]) -> float | None:
    """Time of the lean operation over that of the products alone; null where either is missing."""
    times_ms = [figures[name].get("ms_median") for name in ("lean", "products")]
    return None if None in times_ms else times_ms[0] / times_ms[1]
