"""The learner's step beside a plain one of Megatron-Core: same model, tokens, optimizer, cores.

    python -m benchmarks plain_step [--steps 8] [--dtype float32] [--threads 1] [--model DIR]

In one process, in turn: `learner.train` on a draw cache (distil), the same layers and packing with
Megatron's own loss on next tokens (packed), and Megatron's own layers on a batch without padding
(stock). Seconds are medians over the steps after the first, ratios those of medians. A plain step
computes the logits of every position, the learner those of responses alone, but once more in its
backward pass: both products are timed on their own, so that what remains of the difference is what
loss, packing and bookkeeping add.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from examples.smollm2.models import make_models
from examples.smollm2.settings import BUILD
from harness.case_rows import own_directory, run_program

Tree = dict[str, Any]
SAMPLES, PROMPT, RESPONSE, PER_MICRO = 16, 40, 48, 4
PLAIN_PRODUCTS, OUR_PRODUCTS = 3, 4
"""Products with the LM head in a step: forward, two gradients; the learner makes logits twice."""


def measure(options: Sequence[str] = ()) -> Tree:
    """Run the steps in a process of their own. options: the command line's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plain_step")
    parser.add_argument("--steps", type=int, default=8, help="of each kind; the first is not timed")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, help="default: the student of make demo-real")
    arguments = parser.parse_args(list(options))
    if arguments.steps < 2:
        parser.error(f"--steps must be at least 2, got {arguments.steps}: the first is not timed")
    if arguments.model is None:
        make_models(BUILD)
    case = {
        "model": str(arguments.model or BUILD / "student"),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "steps": arguments.steps,
        "samples": arguments.samples,
        "prompt": PROMPT,
        "response": RESPONSE,
        "per_micro": PER_MICRO,
    }
    with tempfile.TemporaryDirectory() as scratch:
        own = own_directory(Path(scratch))
        figures = run_program("benchmarks.plain_step.train", case, own, limit_s=3600)
    return {"case": case, **added(figures), **figures}


def added(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return medians, ratios and what is left of the difference without the head's products.

    figures: seconds of each step by kind, the first not timed, and head_product_s of all positions
    and of the responses'. added_besides_head: of the plain step (packed); negative: it saves.
    """
    seconds = {kind: median(each[1:]) for kind, each in figures["step_s_of_each"].items()}
    head = {rows: median(each) for rows, each in figures["head_product_s"].items()}
    ours, plain = seconds["distil"], seconds["packed"]
    besides = (ours - OUR_PRODUCTS * head["responses"]) - (plain - PLAIN_PRODUCTS * head["all"])
    return {
        "step_s": seconds,
        "distil_over_packed": ours / plain,
        "distil_over_stock": ours / seconds["stock"],
        "recomputed_head_product": head["responses"] / plain,
        "distil_over_packed_without_recomputing": (ours - head["responses"]) / plain,
        "added_besides_head": besides / plain,
        "packing_and_metrics": median(figures["bookkeeping_s_of_each"][1:]) / plain,
    }
