"""Runs `opd plan`: searches for the split of GPUs, layout and schedule with the highest throughput.

The search, its input and the simulation of a candidate are in megatron_opd/sim/planner; here is
what is printed and written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from megatron_opd.cli.tables.plan import plan_report
from megatron_opd.config.load import validate
from megatron_opd.config.plain_yaml import dump_plain
from megatron_opd.config.schema import Config
from megatron_opd.config.simulation import DEFAULT_GPU
from megatron_opd.errors import UserError
from megatron_opd.inputs.models import check_models
from megatron_opd.sim.inputs import check_sources, check_trajectories
from megatron_opd.sim.planner.configs import chosen_tree
from megatron_opd.sim.planner.demand import Window
from megatron_opd.sim.planner.plan import known_gpu, make_plan, pins_of, task_of
from megatron_opd.sim.planner.result import Plan, throughput
from megatron_opd.sim.planner.search import SearchResult

EVERY_S = 10.0
"""Seconds between two lines of progress."""


def run_plan(
    config: Config,
    console: Console,
    *,
    gpus: int,
    gpu: str | None = None,
    staleness: int | None = None,
    keep: Sequence[str] = (),
    out: Path | None = None,
    trials: int | None = None,
) -> int:
    """Print what a search found, and write the winner to `out`. Raises UserError."""
    if out is not None and out.exists():
        raise UserError(f"--out: {out} exists already; choose another file or remove it")
    if trials is not None and trials < 0:
        raise UserError(f"--trials must be >= 0, got {trials}")
    check_trajectories(config)
    for line in check_sources(config):
        console.print(line, soft_wrap=True)
    if config.evaluation.servers:
        raise UserError(
            "opd plan needs evaluation.servers 0, because every server that it plans is for "
            f"rollouts, got {config.evaluation.servers}; add them to the plan's student.servers"
        )
    chosen = known_gpu(gpu or config.simulation.gpu or DEFAULT_GPU)
    task = task_of(config, gpus, chosen, staleness, pins_of(keep))
    plan = make_plan(task, chosen, Window(), trials or None, _progress())
    tree = chosen_tree(config, plan.winner.candidate, chosen, task.memory_gib)
    check_models(validate(Config, tree, "opd plan"), plan=True)
    for line in plan_report(plan):
        console.print(line, soft_wrap=isinstance(line, str))
    if out is not None:
        try:
            out.write_text(_header(plan) + dump_plain(tree), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out: cannot write {out}: {error.strerror}") from None
        console.print(f"written: {out}", soft_wrap=True)
    return 0


def _header(plan: Plan) -> str:
    """Return the comment that begins the file."""
    return (
        f"# Chosen by opd plan for {plan.task.gpus} {plan.gpu} GPUs, staleness at most "
        f"{plan.task.staleness}: {throughput(plan.winner, plan.demand):,.0f} response tokens/s "
        "predicted\n"
    )


def _progress() -> Callable[[SearchResult], None]:
    """Return what prints a line now and then on standard error."""
    said_s = time.monotonic()

    def tell(found: SearchResult) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= EVERY_S:
            said_s = time.monotonic()
            print(  # noqa: T201
                f"{found.enumerated:,} candidates, {len(found.trials)} simulated", file=sys.stderr
            )

    return tell
