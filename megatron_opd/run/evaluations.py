"""Connects the evaluations of a run with its fleets, its files and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.config.schema import Config
from megatron_opd.controller.ports import Keeper, TakeState
from megatron_opd.environments.playing import Playing
from megatron_opd.evaluation.evaluations import Evaluations, Surroundings
from megatron_opd.evaluation.ports import CompletionPort, FleetPort, RespellingPort
from megatron_opd.evaluation.sets import evaluated_sets
from megatron_opd.inputs.other_tokenizer import read_by_teacher
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.metrics.observers import RunObserver
from megatron_opd.metrics.types import Depths, WeightSyncReport
from megatron_opd.records.types import Batch
from sglang_bridge.fleet import Fleet


class EvaluatedVersions(RunObserver):
    """Tells the evaluations of each version that is live; observes after its row was written."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """Let what is due begin in the background."""
        self._evaluations.live(report.version)


def port_of(config: Config, prepared: Prepared, role: Role, fleet: Fleet) -> CompletionPort:
    """Return what samples completions from a role's servers, in the student's ids."""
    port, other = FleetPort(fleet, config.rollout.attempts, prepared.ends[role].ids), prepared.other
    if role == STUDENT or other is None:
        return port
    read = read_by_teacher([each for own in prepared.heldout.values() for each in own])
    return RespellingPort(port, read, other.respelt, prepared.ends[STUDENT].ids)


def evaluations_before(
    config: Config,
    prepared: Prepared,
    fleets: Mapping[Role, Fleet],
    say: Callable[[str], None],
    playing: Playing | None = None,
) -> Evaluations:
    """Make the evaluations before the first update: nothing trains, and no file is open yet."""
    run = Surroundings(
        port=lambda: port_of(config, prepared, STUDENT, fleets[STUDENT]),
        updates=lambda: 0,
        elapsed_s=lambda: 0.0,
        record=lambda row: None,
        end_early=lambda: None,
        say=say,
        playing=playing,
    )
    return evaluations_in(config, prepared, run)


def evaluations_in(config: Config, prepared: Prepared, run: Surroundings) -> Evaluations:
    """Make the evaluations of a run's held-out sets."""
    judged = prepared.judge is not None or run.playing is not None
    sets = evaluated_sets(config, prepared.heldout) if judged else {}
    return Evaluations(config.evaluation, sets, prepared.judge, run, config.run.max_steps)


class EvaluatingKeeper:
    """Evaluates before it writes a checkpoint, where training waits for evaluations.

    Implements controller.ports.Keeper: whatever a keeper does, the next update waits for.
    """

    def __init__(self, checkpoints: Keeper, evaluations: Evaluations) -> None:
        self._checkpoints, self._evaluations = checkpoints, evaluations

    def due(self, updates: int) -> bool:
        """Return whether training has to wait once these updates are live."""
        evaluates = self._evaluations.waits and self._evaluations.falls_on(updates)
        return evaluates or self._checkpoints.due(updates)

    async def after_update(self, updates: int, state: TakeState) -> None:
        """Evaluate, then save a checkpoint that knows the result."""
        if self._evaluations.waits:
            await self._evaluations.waited_for(updates)
        if self._checkpoints.due(updates):
            await self._checkpoints.after_update(updates, state)

    async def at_end(self, updates: int, state: TakeState) -> None:
        """Save a checkpoint of a run that ends early."""
        await self._checkpoints.at_end(updates, state)
