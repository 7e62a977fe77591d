"""Runs `opd simulate`: a run directory as of a real run, and a table of what would limit it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_opd.checkpoint.run_dir import RunDir, hold_run_dir, prepare_run_dir
from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.config.schema import Config
from megatron_opd.errors import RunFailed, UserError
from megatron_opd.metrics.observers import Observers, RunObserver
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.sinks import JsonlSink, Sink, write_json
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.tensorboard import TensorBoardSink
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.output import new_table
from megatron_opd.sim.calibration import Calibration, calibrate
from megatron_opd.sim.costs import encode_costs
from megatron_opd.sim.inputs import check_sources, check_trajectories, costs_of, lengths_of
from megatron_opd.sim.outcome import Outcome
from megatron_opd.sim.world import check_costs, simulate

NOT_SIMULATED = (
    *("loss", "reverse_kl_nats", "grad_norm", "lr", "ratio_p99", "ratio_max"),
    *("reward_mean", "reward_group_std_mean", "reward_uniform_group_fraction"),
    *("distinct_ids_per_token", "cached_ids_per_token", "cache_bytes_per_token"),
    *("peak_rss_bytes",),
)
"""Columns and keys of the summary that are null: nothing is learnt or held in memory."""
LIMITS = 0.9
"""Share of the time that a stage must work for the others to be said to wait for it."""


def run_simulation(
    config: Config,
    console: Console,
    *,
    costs_file: Path | None = None,
    recorded: Path | None = None,
    overwrite: bool = False,
) -> int:
    """Simulate one run and write its directory. UserError; RunFailed: it could not go on.

    costs_file: instead of config.simulation.costs. recorded: directory of the run that costs and
    lengths are fitted to instead.
    """
    check_trajectories(config)
    for line in check_sources(config):
        console.print(line, soft_wrap=True)
    if recorded is None:
        costs, lengths = costs_of(config, costs_file), lengths_of(config)
    else:
        calibration = calibrate(recorded)
        console.print(calibration_table(calibration, recorded))
        costs, lengths = calibration.fitted.costs, calibration.fitted.lengths
    check_costs(config, costs)
    if config.evaluation.every and config.heldout:
        console.print("note: evaluation.every is ignored: evaluations are not simulated")
    _spare_real_run(RunDir(config.run.dir))
    given = costs_file or recorded
    resolved = config if given is None else naming_its_costs(config, recorded)
    with hold_run_dir(config.run.dir, resume=False, overwrite=overwrite):
        run_dir = prepare_run_dir(config.run.dir, resolved)

        def make_observer(totals: RunTotals, urls: Mapping[Role, tuple[str, ...]]) -> RunObserver:
            return _observer(config, run_dir, totals, urls[STUDENT])

        began_s = time.monotonic()
        outcome = simulate(config, costs, lengths, make_observer)
        took_s = time.monotonic() - began_s
        write_json(run_dir.summary, summary_of(outcome))
        run_dir.costs.write_bytes(encode_costs(costs))
    console.print(outcome_table(outcome))
    console.print(f"limited by: {bottleneck(outcome)}", soft_wrap=True)
    console.print(f"simulated in {took_s:.1f} s; summary: {run_dir.summary}", soft_wrap=True)
    if outcome.cause is not None:
        raise RunFailed(f"the simulated run ended early: {outcome.cause}")
    return 0


def _spare_real_run(run_dir: RunDir) -> None:
    """Raise UserError where a run that trained would be replaced: its processes left logs."""
    for products in (run_dir.checkpoints, run_dir.logs):
        if products.is_dir() and any(products.iterdir()):
            raise UserError(
                f"run.dir {run_dir.path} holds {products.name} of a real run, which opd simulate "
                "never replaces; add --set run.dir=ANOTHER"
            )


def naming_its_costs(config: Config, recorded: Path | None) -> Config:
    """Return a configuration that gives the same run without --costs or --calibrate.

    recorded: the run that lengths were drawn from; None: as the configuration says.
    """
    changes: dict[str, Any] = {"gpu": None, "costs": RunDir(config.run.dir).costs}
    if recorded is not None:
        lengths = config.simulation.lengths
        changes["lengths"] = lengths.model_copy(update={"recorded": recorded})
    simulation = config.simulation.model_copy(update=changes)
    return config.model_copy(update={"simulation": simulation})


class SimulatedRows:
    """Passes rows on to a sink without what is not simulated."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Pass a row on. The run begins at the clock's 0, so that equal runs have equal rows."""
        unknown = dict.fromkeys(name for name in NOT_SIMULATED if name in row)
        self._sink.write(update, {**row, **unknown, "unix_time_s": row["time_s"]})

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Do nothing: a simulated student is not evaluated."""

    def close(self) -> None:
        """Close the sink behind."""
        self._sink.close()


def _observer(
    config: Config, run_dir: RunDir, totals: RunTotals, engines: tuple[str, ...]
) -> RunObserver:
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if config.metrics.tensorboard:
        sinks.append(TensorBoardSink(run_dir.tensorboard, config.metrics.names))
    clock = asyncio.get_running_loop().time
    found: list[RunObserver] = []
    if config.metrics.trace:
        found.append(Timeline(TraceWriter(run_dir.trace, clock()), engines, clock))
    found.append(RunRecorder(totals, [SimulatedRows(sink) for sink in sinks], clock))
    return Observers(found)


def summary_of(outcome: Outcome) -> dict[str, Any]:
    """Return the summary of a simulated run, with the keys of a real one."""
    summary: dict[str, Any] = {
        "simulated": True,
        "status": "finished" if outcome.cause is None else "failed",
        "cause": outcome.cause,
    }
    summary |= summarise(
        outcome.totals, outcome.accounting, outcome.wall_s, outcome.staleness_bound
    )
    summary |= dict.fromkeys(name for name in NOT_SIMULATED if name in summary)
    return summary | {
        "resumed_at_updates": [],
        "resumed_with_changes": [],
        "servers_lost": outcome.servers_lost,
        "servers_restarted": outcome.servers_restarted,
        "servers_added": [],
        "servers_removed": [],
        "learner_restarts": 0,
        "updates_rolled_back": 0,
        "samples_readmitted": outcome.samples_readmitted,
        "requests_timed_out": outcome.requests_timed_out,
        "frames_refused": 0,
        "prompts_skipped": {},
        "busy": outcome.busy,
        "sites": {name: asdict(site) for name, site in outcome.sites.items()},
    }


UNIT = {"student": "step", "teacher": "pass", "learner": "update"}


def calibration_table(found: Calibration, run_dir: Path) -> Table:
    """Return what was fitted to a run, and how well it predicts the half that it has not seen."""
    table = new_table(f"costs fitted to {run_dir}", ("what", "value"))
    costs = found.fitted.costs
    cores = "own hardware each" if costs.host_cores is None else f"{costs.host_cores:.2f} cores"
    for part, error in found.fitted.errors.items():
        table.add_row(f"{part}: error of one {UNIT[part]} (root mean square)", f"{error:.1%}")
    table.add_row("what learner and servers share", cores)
    table.add_row("second half, recorded (tokens/s)", f"{found.recorded_tokens_per_s:,.1f}")
    table.add_row("predicted from the first half", f"{found.predicted_tokens_per_s:,.1f}")
    table.add_row("error out of sample", f"{found.error:+.1%}")
    return table


def outcome_table(outcome: Outcome) -> Table:
    """Return the figures that a schedule or a layout is chosen by."""
    table = new_table("simulated run", ("what", "value"))
    stale = outcome.totals.staleness.samples
    rows = (
        ("updates", f"{outcome.updates}"),
        ("virtual seconds", f"{outcome.wall_s:,.1f}"),
        ("samples/s", f"{outcome.samples_per_s:,.2f}"),
        ("response tokens/s, after the first 5 updates", _text(outcome.tokens_per_s, ",.0f")),
        ("updates/h", f"{outcome.updates_per_hour:,.1f}"),
        ("learner idle", _text(outcome.learner_idle_ratio, ".1%")),
        ("student servers idle", _text(outcome.rollout_idle_ratio, ".1%")),
        ("teacher servers idle", _text(outcome.teacher_idle_ratio, ".1%")),
        ("staleness, mean (versions)", _text(outcome.staleness_mean, ".3f")),
        (
            "staleness, largest (bound)",
            f"{_text(outcome.staleness_max, 'd')} ({outcome.staleness_bound})",
        ),
        ("staleness of samples, median, 95%", f"{stale.quantile(0.5)}, {stale.quantile(0.95)}"),
        ("samples dropped", _counts(outcome.accounting.dropped)),
        ("servers started again", f"{outcome.servers_restarted}"),
    )
    for row in rows:
        table.add_row(*row)
    for name, site in outcome.sites.items():
        text = f"{site.samples} samples, {site.loads} versions, idle {site.idle_ratio:.1%}"
        table.add_row(f"site {name}", text)
    return table


def bottleneck(outcome: Outcome) -> str:
    """Return in words which stage the others wait for."""
    stage, share = max(outcome.busy.items(), key=lambda item: item[1])
    name = stage if stage == "learner" else f"{stage} servers"
    if share >= LIMITS:
        return f"{name}, busy {share:.0%} of the time"
    return (
        f"the stages wait for each other, none is busy {LIMITS:.0%} of the time (most: {name}, "
        f"{share:.0%}); see schedule.max_staleness, rollout.concurrency and scoring.concurrency"
    )


def _counts(found: Mapping[str, int]) -> str:
    """Return the sum, and what it is made of."""
    parts = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
    return f"{sum(found.values())} ({parts})" if parts else "0"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
