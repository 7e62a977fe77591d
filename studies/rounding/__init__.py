"""How long bfloat16 weights stand still under a small learning rate, and what samplers see of it.

    python -m studies rounding [--updates 16]

The pretrained student of `make demo-real` learns from its teacher in bfloat16, with the float32
main weights that the learner keeps, on responses that its first version sampled. After 1, 2, 4, ...
updates: how many rounded weights, which are what samplers receive, are those of the beginning; how
much of the main weights' movement they show; and what both make of the log-probs of held-out
responses, computed in float32. Beside it, the same steps added to bfloat16 weights alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.smollm2.models import make_models
from examples.smollm2.settings import BUILD
from harness.case_rows import own_directory, run_program, say

Tree = dict[str, Any]
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
BATCH, TOKENS = 8, 32


def measure(options: Sequence[str] = ()) -> Tree:
    """Train at each learning rate in a process of its own. options: the command line's."""
    parser = argparse.ArgumentParser(prog="python -m studies rounding")
    parser.add_argument("--updates", type=int, default=16)
    arguments = parser.parse_args(list(options))
    look_at = [2**i for i in range(arguments.updates.bit_length())]
    make_models(BUILD)
    asked = {
        "student": str(BUILD / "student"),
        "teacher": str(BUILD / "teacher"),
        "updates": arguments.updates,
        "look_at": look_at,
        "batch": BATCH,
        "tokens": TOKENS,
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for rate in LEARNING_RATES:
            own = own_directory(Path(scratch))
            case = asked | {"learning_rate": rate}
            found[f"{rate:g}"] = run_program("studies.rounding.train", case, own, limit_s=1800)
            say(f"{rate:g}: {found[f'{rate:g}']['rows'][-1]}")
    return {
        "optimizer": "AdamW, beta1 0.9, beta2 0.95, constant learning rate, no weight decay",
        "batch": {"responses": BATCH, "tokens_of_each_at_most": TOKENS},
        "by_learning_rate": {rate: figures["rows"] for rate, figures in found.items()},
    }
