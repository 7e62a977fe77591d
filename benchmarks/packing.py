"""How long data-parallel ranks that share experts wait for each other in every layer.

    python -m benchmarks packing [--batches N]

Lockstep cost: sum over steps (micro-batch i of every rank) of the heaviest rank's load, over the
load of all divided by the ranks; 1: nobody waits. Loads are tokens, what plans balance; flops: the
same plans weighed by what Qwen3-30B-A3B computes of them, attention included. Batches of 256
samples: prompts of 200 tokens, lognormal responses of mean 4,000 (Lengths of `opd simulate`), cut
at 16,384. 8 ranks. Means over the batches, and the worst one.

before: ranks packed apart, micro-batches in the order of their first samples. random: the same
micro-batches in random orders, the control. sorted: the same, heaviest first, as ranks without
shared experts have them. steps: what ranks with shared experts get (megatron_opd/batching/
steps.py). bound: no packing costs less, whatever its steps. micro_batches: of a rank in a batch.
ranks: the ranks' sums alone, the heaviest over the mean: the cost where nothing is shared.

`failed` unless steps cost at most 1.19 with four mini-batches in the mean of each case.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_opd.batching.plan import BatchPlan, plan_batch
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.sim.costs import LognormalLengths
from megatron_opd.sim.lengths import LengthDraws
from megatron_opd.sizing.flops import Work, train_flops

MODEL = Path("examples/cluster/models/Qwen3-30B-A3B")
SAMPLES, RANKS, PROMPT, LONGEST, MEAN = 256, 8, 200, 16_384, 4_000.0
SPREADS = (0.8, 1.6)
BUDGETS = (8_192, 18_432)  # the default, and that of the cluster examples
MINIS = (1, 4)
MOST = 1.19

Loads = Sequence[float]


def in_order_of_samples(plan: BatchPlan) -> BatchPlan:
    """Return the plan with each rank's micro-batches in the order of their samples."""
    return [[sorted(micros) for micros in mini] for mini in plan]


def shuffled(plan: BatchPlan, draw: random.Random) -> BatchPlan:
    """Return the plan with each rank's micro-batches in a random order of its own."""
    return [[draw.sample(micros, len(micros)) for micros in mini] for mini in plan]


def by_rank(plan: BatchPlan, loads: Loads) -> list[list[list[float]]]:
    """Return the load of every micro-batch."""
    return [[[sum(loads[i] for i in m) for m in micros] for micros in mini] for mini in plan]


def lockstep_cost(plan: BatchPlan, loads: Loads) -> float:
    """Return what the module says."""
    minis = by_rank(plan, loads)
    heaviest = sum(max(step) for mini in minis for step in zip(*mini, strict=True))
    return heaviest / (sum(loads) / len(plan[0]))


def rank_cost(plan: BatchPlan, loads: Loads) -> float:
    """Return the same where ranks meet at the end of a mini-batch alone."""
    minis = by_rank(plan, loads)
    return sum(max(map(sum, mini)) for mini in minis) / (sum(loads) / len(plan[0]))


def least_cost(lengths: Sequence[int], minis: int, budget: int) -> float:
    """Return what no packing can cost less than.

    A sample beyond the budget is alone: of every eight the longest takes its own time; what they
    leave of their steps holds at most the budget on a rank, and the rest is divided equally.
    """
    size, total = len(lengths) // minis, 0.0
    for start in range(0, len(lengths), size):
        mini = sorted(lengths[start : start + size], reverse=True)
        alone = [length for length in mini if length > budget]
        room = -len(alone) % RANKS * budget
        rest = max(0, sum(mini) - sum(alone) - room)
        total += max(sum(mini) / RANKS, mini[0], sum(alone[::RANKS]) + rest / RANKS)
    return total / (sum(lengths) / RANKS)


def batch(spread: float, seed: int, spec: ModelSpec) -> tuple[list[int], list[float]]:
    """Draw a batch: the tokens of its samples, and their FLOPs."""
    lengths = LognormalLengths(mean=MEAN, cv=spread, prompt_tokens=PROMPT)
    draws = LengthDraws(lengths, LONGEST, seed)
    pairs = [(PROMPT, draws.response(sample)[0]) for sample in range(SAMPLES)]
    return [sum(pair) for pair in pairs], [float(train_flops(spec, Work.of([p]))) for p in pairs]


def plans(lengths: Sequence[int], minis: int, budget: int, seed: int) -> dict[str, BatchPlan]:
    """Plan a batch in every way."""
    apart = plan_batch([[n] for n in lengths], minis, RANKS, budget)
    return {
        "before": in_order_of_samples(apart),
        "random": shuffled(apart, random.Random(seed)),
        "sorted": apart,
        "steps": plan_batch([[n] for n in lengths], minis, RANKS, budget, lockstep=True),
    }


def case(spread: float, budget: int, minis: int, batches: int, spec: ModelSpec) -> dict[str, Any]:
    """Plan so many batches of one kind."""
    ways: dict[str, list[dict[str, float]]] = {}
    bounds: list[float] = []
    costs: dict[str, Callable[[BatchPlan, list[int], list[float]], float]] = {
        "tokens": lambda plan, lengths, flops: lockstep_cost(plan, lengths),
        "flops": lambda plan, lengths, flops: lockstep_cost(plan, flops),
        "ranks": lambda plan, lengths, flops: rank_cost(plan, lengths),
        "micro_batches": lambda plan, lengths, flops: sum(len(mini[0]) for mini in plan),
    }
    for seed in range(batches):
        lengths, flops = batch(spread, seed, spec)
        bounds.append(least_cost(lengths, minis, budget))
        for way, plan in plans(lengths, minis, budget, seed).items():
            found = {name: cost(plan, lengths, flops) for name, cost in costs.items()}
            ways.setdefault(way, []).append(found)
    rows = {
        way: {name: round(fmean(each[name] for each in found), 4) for name in costs}
        | {"worst_tokens": round(max(each["tokens"] for each in found), 4)}
        for way, found in ways.items()
    }
    return {
        "spread": spread,
        "tokens_of_a_micro_batch": budget,
        "mini_batches": minis,
        "bound": round(fmean(bounds), 4),
        "ways": rows,
    }


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Plan everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks packing")
    parser.add_argument("--batches", type=int, default=50)
    batches = parser.parse_args(options).batches
    spec = read_model_spec(MODEL)
    cases = [
        case(spread, budget, minis, batches, spec)
        for spread in SPREADS
        for budget in BUDGETS
        for minis in MINIS
    ]
    worst = max(each["ways"]["steps"]["tokens"] for each in cases if each["mini_batches"] == 4)
    return {
        "samples": SAMPLES,
        "ranks": RANKS,
        "batches": batches,
        "cases": cases,
        "most_with_four_mini_batches": worst,
        "failed": worst > MOST,
    }
