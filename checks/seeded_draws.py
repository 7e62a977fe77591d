"""Whether the kernel of the seeded draw chooses the ids that SGLang's function chooses.

    python -m checks seeded_draws > new.json && mv new.json benchmarks/results/seeded_draws.json

A million draws by flat, likely and certain distributions and cut ones, over four vocabularies, on
Triton's interpreter; rows of ties, of NaN and of the ends of the hash besides. The control is the
same draw with float32 noise: `in_float32` draws are others. A GPU compares the two in
tests/gpu/test_seeded_cuda.py.
"""

from __future__ import annotations

from typing import Any

from tests.support.interpreted import interpreted

DRAWS = 1_000_000


def measure() -> dict[str, Any]:
    """Draws, and how many of them are another id than SGLang's."""
    entries = interpreted("seeded_job", str(DRAWS))
    ordinary = [entry for entry in entries if "seconds" in entry]
    different, impossible = (
        sum(entry.get(name, 0) for entry in entries) for name in ("different", "impossible")
    )
    seen = sum(entry["in_float32"] for entry in ordinary)
    return {
        "draws": sum(entry["draws"] for entry in ordinary),
        "different": different,
        "impossible": impossible,
        "in_float32": seen,
        "entries": entries,
        "failed": bool(different or impossible or not seen),
    }
