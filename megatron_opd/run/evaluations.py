"""Connects the evaluations of a run with its fleets, its files and its checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.config.schema import Config
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Keeper, TakeState
from megatron_opd.evaluation.evaluations import Evaluations
from megatron_opd.evaluation.measure import CompletionPort, FleetPort
from megatron_opd.evaluation.ports import Surroundings
from megatron_opd.evaluation.progress import Evaluated, EvaluationProgress
from megatron_opd.evaluation.sets import evaluated_sets
from megatron_opd.evaluation.summary import summary_of
from megatron_opd.inputs.prepare import Prepared
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.sinks import json_ready
from megatron_opd.run.checkpoints import Checkpoints
from sglang_bridge.fleet import Fleet


class RunEvaluations:
    """Holds the evaluations of one run, and records them wherever the run does by then.

    Rows of a time without a recorder, as before the run, are written by the next one.

    Args:
        config: the run's.
        prepared: its problems and verifier.
        fleets: of all roles, once they are there.
        say: tells the user.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        fleets: Mapping[Role, Fleet],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._fleets, self._ends = config, fleets, prepared.ends
        self._recorder: RunRecorder | None = None
        self._controller: Controller | None = None
        self._unwritten: list[Mapping[str, Any]] = []
        self._sets = evaluated_sets(config, prepared)
        self._before, self._after = EvaluationProgress(), False
        run = Surroundings(
            port=lambda: self._port(STUDENT),
            updates=lambda: self._accounted(),
            elapsed_s=self._elapsed_s,
            record=self._record,
            end_early=self._end_early,
            say=say,
        )
        last = config.run.max_steps
        self.run = Evaluations(config.evaluation, self._sets, prepared.judge, run, last)

    # ------------------------------------------------------------ in the course of the run

    async def before(self, teachers: Mapping[str, Role]) -> list[str]:
        """Evaluate student and teachers, {name: role}; return the lines for the user."""
        ports = {name: self._port(role) for name, role in teachers.items()}
        lines = await self.run.before(ports)
        self._before = self.run.progress()
        return lines

    async def after(self, updates: int) -> list[str]:
        """Evaluate the last weights, once nothing else is evaluated; return the lines."""
        lines = await self.run.after(updates)
        self._after = self._config.evaluation.after
        return lines

    def continue_from(self, kept: EvaluationProgress | None) -> str:
        """Forget what came after a checkpoint; return the rows of evaluations.jsonl until it.

        kept: its; None: continue from what there was before the first update.
        """
        progress = self._before if kept is None else kept
        self.run.restore(progress)
        self._unwritten.clear()
        return rows_of(progress)

    def summary(self, updates: int) -> dict[str, Any]:
        """Return the keys of summary.json. updates: of the run."""
        return summary_of(self.run, list(self._sets), updates if self._after else None)

    # ------------------------------------------------------------ beside the controller

    def connect(self, recorder: RunRecorder, controller: Controller) -> None:
        """Record by `recorder` from now on, and follow this controller."""
        self._recorder, self._controller = recorder, controller
        unwritten, self._unwritten = self._unwritten, []
        for row in unwritten:
            recorder.evaluated(row)

    def keeper(self, checkpoints: Checkpoints) -> EvaluatingKeeper:
        """Return what writes checkpoints, after the evaluations that training waits for."""
        return EvaluatingKeeper(checkpoints, self.run)

    async def close(self) -> None:
        """Evaluate nothing more and close the recorder's files; another recorder may follow."""
        await self.run.abandon()
        recorder, self._recorder, self._controller = self._recorder, None, None
        if recorder is not None:
            recorder.close()

    def preempted(self) -> None:
        """End training early, and evaluate nothing more: the run that continues does."""
        self._end_early()
        self.run.interrupt()

    def _end_early(self) -> None:
        if self._controller is not None:
            self._controller.end_early()

    def _accounted(self) -> int:
        return 0 if self._controller is None else self._controller.accounting.updates

    def _elapsed_s(self) -> float:
        return 0.0 if self._recorder is None else time.monotonic() - self._recorder.started_s

    def _record(self, row: Mapping[str, Any]) -> None:
        if self._recorder is None:
            self._unwritten.append(row)
        else:
            self._recorder.evaluated(row)

    def _port(self, role: Role) -> CompletionPort:
        attempts = self._config.rollout.attempts
        return FleetPort(self._fleets[role], attempts, self._ends[role].ids)


def rows_of(progress: EvaluationProgress) -> str:
    """Return the content of evaluations.jsonl that a checkpoint stands for."""
    return "".join(f"{_line(row)}\n" for row in progress.rows)


def _line(row: Evaluated) -> str:
    return json.dumps(json_ready(row.row()), allow_nan=False)


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
