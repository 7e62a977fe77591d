"""What docs/estimators.md shows as measured: errors against the oracles, and biases."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from harness.header import machine
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objectives import RewardObjective
from megatron_opd.losses.objective import evaluate
from megatron_opd.metrics.summary import commit, versions
from tests.support.loss_cases import accepted, cache_of, draw_rows, estimator, problem, student_logp
from tests.support.loss_expectations import (
    PENALTIES,
    PENALTY_COEFFICIENT,
    exact_penalty,
    expectation,
    expected_group,
    penalised,
    policy_gradient,
    unrewarded,
    worth,
)
from tests.support.loss_oracles import exact, oracle

PATH = {"type": "path"}
MC = {"type": "mc", "m": 3}
OPD = ("reverse_kl", "sparse_reverse_kl", "forward_kl", "jsd", "skew_forward_kl", "skew_reverse_kl")
REWARD = ("reinforce", "ppo", "grpo", "gspo", "gepo")
SUPPORTS: tuple[dict[str, Any], ...] = (
    MC,
    PATH,
    {"type": "atoms_tail", "k": 1, "m": 2},
    {"type": "exact"},
    {"type": "topk", "k": 2},
    {"type": "teacher_topk", "k": 2},
    {"type": "teacher_mc", "m": 3},
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"support": MC},
    {"support": MC, "objective": {"advantage": "rollout"}},
    {"support": MC, "objective": {"trust": {"type": "clip"}}},
    {"support": MC, "objective": {"trust": {"type": "m2"}}},
    {"support": MC, "objective": {"trust": {"type": "m2", "moment": "capped"}}},
    {"support": MC, "correction": {"type": "none"}},
    {"support": MC, "correction": {"type": "none", "prox": True}},
    {"support": MC, "correction": {"type": "importance", "prox": True}},
    {"support": MC, "correction": {"type": "truncated", "max_ratio": 1.05}},
    {"support": MC, "correction": {"type": "truncated", "max_ratio": 1.05, "prox": True}},
    {"support": MC, "correction": {"type": "masked", "min_ratio": 0.8, "max_ratio": 1.2}},
    {
        "support": MC,
        "objective": {"trust": {"type": "clip", "dual": 3.0}},
        "correction": {"type": "truncated", "max_ratio": 1.05, "prox": True},
    },
    *(
        {"support": {"type": "topk", "k": 2}, "objective": {"type": kind, "outside": outside}}
        for kind in ("sparse_reverse_kl", "forward_kl")
        for outside in ("renormalise", "bucket", "drop")
    ),
    *(
        {"support": {"type": "topk", "k": 2}, "objective": {"outside": outside}}
        for outside in ("drop", "renormalise")
    ),
    *(
        {
            "support": PATH,
            "objective": {"type": "reinforce", "advantage": advantage},
            "correction": {"type": "importance", "level": level},
        }
        for advantage, level in (
            ("reward", "token"),
            ("reward", "sequence"),
            ("reward", "geometric"),
            ("group_mean", "sequence"),
            ("group_std", "sequence"),
            ("group_std_population", "sequence"),
            ("leave_one_out", "sequence"),
        )
    ),
)


def plain(kind: str, support: dict[str, Any]) -> Estimator | None:
    """The objective by its name alone on a support; None where config refuses it."""
    try:
        return estimator(support=support, objective={"type": kind})
    except ValidationError:
        return None


def plains() -> Iterator[tuple[str, Estimator]]:
    """(name, estimator) of the main table's rows."""
    for kind in (*OPD, *REWARD):
        for support in SUPPORTS:
            est = plain(kind, support)
            if est is not None:
                yield f"{kind} {support['type']}", est


def gradient_bias(est: Estimator) -> float:
    """|E[g] - g| / |g|: the gradient's expectation over all caches against the exact gradient."""
    if isinstance(est.objective, RewardObjective):
        case = problem(8, lengths=(2,), vocab=3)
        fixed = estimator(
            **(est.model_dump() | {"reduction": {"type": "fixed_length", "length": 1}})
        )
        got, truth = expected_group(fixed, case, 2, worth)[0], policy_gradient(case, worth)
    else:
        case = problem(2, lengths=(1,))
        got, truth = expectation(est, case)[1], exact(est.objective, case)[1]
    return float((got - truth).norm() / truth.norm())


def penalty_bias(kl: dict[str, Any]) -> dict[str, float]:
    """Largest |E[estimate] - divergence| over a few problems: of the value, of the gradient."""
    value, gradient = 0.0, 0.0
    for seed in range(5):
        case = unrewarded(seed)
        found_value, found = expectation(penalised(kl), case)
        exact_value, slope = exact_penalty(kl, case)
        value = max(value, abs(found_value / PENALTY_COEFFICIENT - exact_value))
        gradient = max(gradient, float((found / PENALTY_COEFFICIENT - slope).abs().max()))
    return {"value": value, "gradient": gradient}


def oracle_errors() -> dict[str, dict[str, float]]:
    """Per objective and support the largest |difference| to the oracle over all combinations."""
    case, found = problem(1), dict[str, dict[str, float]]()
    for number, est in enumerate(accepted()):
        rows = draw_rows(est.support, case, np.random.default_rng(number))
        logits = case.student_TV.clone().requires_grad_()
        result = evaluate(est, cache_of(est, case, rows, student_logp(logits, rows)))
        loss = result.loss_sum / result.count
        (gradient,) = torch.autograd.grad(loss, logits, materialize_grads=True)
        value, exact_gradient = oracle(est, case, rows)
        name = f"{est.objective.type} {est.support.type}"
        row = found.setdefault(name, {"combinations": 0, "value": 0.0, "gradient": 0.0})
        row["combinations"] += 1
        row["value"] = max(row["value"], abs(float(loss.detach()) - value))
        row["gradient"] = max(row["gradient"], float((gradient - exact_gradient).abs().max()))
    return found


def measure() -> dict[str, Any]:
    """What the page shows as measured."""
    from tests.dist import objective_jobs  # imports gloo's workers: only where they are used
    from tests.dist.worlds import run_world

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "world"
        parallel = run_world(objective_jobs.sweep, 2, out, estimators=accepted())["errors"]
    rows = oracle_errors()
    for name, row in rows.items():
        errors = parallel[name]
        row["tp_value"] = errors["value"]
        row["tp_gradient"] = max(errors["hidden gradient"], errors["weight gradient"])
    return {
        "command": "python tools/estimator_table.py --measure",
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "errors": rows,
        "bias": {name: gradient_bias(est) for name, est in plains()},
        "variant_bias": [gradient_bias(estimator(**tree)) for tree in VARIANTS],
        "penalty_bias": [penalty_bias(kl) for kl in PENALTIES],
    }
