"""Variance of a draw cache on the prefixes of a pretrained model (AsyncOPD App. E).

    python -m studies prefixes [--budget-s S] [--responses N] [--ages 1 4 16]
        [--dir runs/prefixes]

The old student is the pruned model of `make demo-real`; the current student is the same after 0, 1,
4 and 16 updates of distillation by this project; the teacher is the unpruned model. At every prefix
of the old student's own responses to held-out prompts the errors of all supports are enumerated
over the 49,152 ids (enumerate/), without a draw. Some prefixes are drawn as well, by the servers'
code, and two kinds of wrong caches with them (drawn/): `failed` where a sound cache disagrees with
the enumeration, or a wrong one agrees.

Models, responses and rows stay in the directory. A row is a response at a staleness, or the drawn
caches of a staleness; stopped after --budget-s, the study goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.prefixes.students import STALENESSES
from studies.prefixes.study import Budget, run_study


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of all rows that there are. options: the command line's."""
    parser = argparse.ArgumentParser(prog="python -m studies prefixes")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--responses", type=int, default=88)
    parser.add_argument("--ages", type=int, nargs="*", default=list(STALENESSES))
    parser.add_argument("--dir", type=Path, default=Path("runs/prefixes"))
    given = parser.parse_args(list(options))
    return run_study(given.dir, given.responses, given.ages, Budget(given.budget_s))
