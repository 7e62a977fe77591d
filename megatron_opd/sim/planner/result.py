"""Holds what `opd plan` found, for those who print and write it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.config.simulation import Gpu
from megatron_opd.sim.planner.candidates import Space
from megatron_opd.sim.planner.costing import PlanTask
from megatron_opd.sim.planner.demand import Demand
from megatron_opd.sim.planner.phases import RunPhase
from megatron_opd.sim.planner.search import SearchResult, Trial
from megatron_opd.sim.planner.space import Losers


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """Holds what a simulation said. seconds: between the ends of the window's updates."""

    seconds: float
    busy: dict[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds what a plan is made from and what was found. phases: the winner's, by name."""

    task: PlanTask
    gpu: Gpu
    demand: Demand
    space: Space
    losers: Losers
    found: SearchResult
    phases: dict[str, RunPhase]
    took_s: float

    @property
    def winner(self) -> Trial:
        """Returns the fastest."""
        return self.found.front[-1]


def throughput(trial: Trial, demand: Demand) -> float:
    """Return the response tokens trained per second."""
    return demand.tokens / trial.measured.seconds
