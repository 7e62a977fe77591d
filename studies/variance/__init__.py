"""Variance of the old-to-current surrogate by support (AsyncOPD App. E).

    python -m studies variance

Three parts, one JSON: the shipped student at several stalenesses, enumerated and drawn
(students.py, report.py, drawn.py); synthetic vocabularies of 152k (synthetic.py); what each cache
costs to store.
"""

from __future__ import annotations

from typing import Any

import torch

from studies.variance.drawn import Effort
from studies.variance.report import study
from studies.variance.students import Training
from studies.variance.synthetic import Sweep, sweep

THREADS = 1


def measure() -> dict[str, Any]:
    """Everything, at the sizes of the recorded result."""
    torch.set_num_threads(THREADS)
    return study(Training(), Effort()) | {"synthetic": sweep(Sweep())}
