"""The simulator against published tables: verl's fully asynchronous trainer, and AsyncOPD.

    python -m studies published > benchmarks/results/published.json

verl: every asynchronous run is predicted from the colocated run of its size, with parameters
fitted on the other runs (verl_rows.py holds the figures, and says which rows are not predicted or
doubtful, and why). AsyncOPD: speed-ups from assumptions alone, beside the range in the paper's text
(asyncopd.py). A few minutes of one core.
"""

from __future__ import annotations

from typing import Any

from studies.published import asyncopd, verl


def measure() -> dict[str, Any]:
    """Return both comparisons. failed: controls that predicted no worse than the simulator."""
    found = verl.study()
    return {"verl": found, "asyncopd": asyncopd.study(), "failed": found["failed"]}
