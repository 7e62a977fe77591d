"""Evaluates the student of one run: before it, every n updates while it trains, and after it.

A version that is live when an evaluation is due begins one in a task of its own, unless one still
runs: then it is skipped and counted. Training waits for it only with evaluation.blocks. Its answers
may span versions otherwise; each row tells which, and how many updates the learner had made by its
end. Whatever fails in it is counted and told once, and never ends the run. Invariant: what has
begun and is not complete is pending, so that a run that continues from a checkpoint evaluates it
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_opd.config.evaluation import ACCURACY, EvaluationConfig
from megatron_opd.config.sections import DEFAULT_TEACHER
from megatron_opd.data.judge import Judge
from megatron_opd.environments.playing import Playing
from megatron_opd.evaluation.examiner import EvaluationPlan
from megatron_opd.evaluation.measure import evaluate
from megatron_opd.evaluation.ports import CompletionPort
from megatron_opd.evaluation.progress import Evaluated, EvaluationProgress, best_of, without_gain
from megatron_opd.evaluation.reports import EvaluationReport
from megatron_opd.evaluation.sets import EvaluatedSet
from sglang_bridge.errors import one_line


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Names what evaluations need of their run.

    port: returns what samples from the student. updates: returns those that the learner has made.
    elapsed_s: returns the seconds since training began. record: takes each row. end_early: ends
    training after the update that is being made. say: tells the user. playing: runs trajectories;
    None: problems are answered once.
    """

    port: Callable[[], CompletionPort]
    updates: Callable[[], int]
    elapsed_s: Callable[[], float]
    record: Callable[[Mapping[str, Any]], None]
    end_early: Callable[[], None]
    say: Callable[[str], None]
    playing: Playing | None = None


class Evaluations:
    """Performs the evaluations of one run. Use from one event loop.

    Args:
        config: when, and what follows.
        sets: by name, in order; none where nothing is evaluated.
        judge: says which completions are right; None: environments do, or nothing is evaluated.
        run: what they need of it.
        last_update: updates of the whole run.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        sets: Mapping[str, EvaluatedSet],
        judge: Judge | None,
        run: Surroundings,
        last_update: int,
    ) -> None:
        self._config, self._sets, self._judge = config, dict(sets), judge
        self._run, self._last_update = run, last_update
        self._rows: list[Evaluated] = []
        self._pending: list[int] = []
        self._teachers: dict[str, dict[str, EvaluationReport]] = {}
        self._task: asyncio.Task[None] | None = None
        self.skipped = self.failed = 0
        self.stopped_at: int | None = None
        """Updates of the evaluation that stopped the run early."""

    # ------------------------------------------------------------ what is known

    @property
    def waits(self) -> bool:
        """Returns whether training waits for evaluations."""
        return self._config.blocks

    @property
    def sets(self) -> tuple[str, ...]:
        """Returns the names of the sets, in order."""
        return tuple(self._sets)

    @property
    def best_set(self) -> str | None:
        """Returns the name of the set that says what is best, or None without any."""
        return self._config.best_set or next(iter(self._sets), None)

    @property
    def rows(self) -> tuple[Evaluated, ...]:
        """Returns what was found of the student, in the order in which it was."""
        return tuple(self._rows)

    def best(self, name: str) -> Evaluated | None:
        """Return the best evaluation of a set by best_metric, or by accuracy if it lacks that."""
        rows = [row for row in self._rows if row.set == name]
        return best_of(rows, self._config.best_metric) or best_of(rows, ACCURACY)

    @property
    def teachers(self) -> Mapping[str, Mapping[str, EvaluationReport]]:
        """Returns {name: {set: report}} of the teachers, before the run."""
        return self._teachers

    @property
    def wanted(self) -> frozenset[int]:
        """Returns the updates whose weights are the best ones, or may turn out to be."""
        name = self.best_set
        best = None if name is None else self.best(name)
        return frozenset(self._pending) | (frozenset() if best is None else {best.update})

    def progress(self) -> EvaluationProgress:
        """Return what a checkpoint keeps."""
        return EvaluationProgress(
            self.rows, tuple(self._pending), self.skipped, self.failed, dict(self._teachers)
        )

    def restore(self, progress: EvaluationProgress) -> None:
        """Continue from what a checkpoint kept; nothing may be running."""
        assert self._task is None, "an evaluation is running"
        self._rows, self._pending = list(progress.rows), list(progress.pending)
        self.skipped, self.failed = progress.skipped, progress.failed
        self._teachers = {name: dict(reports) for name, reports in progress.teachers.items()}
        self.stopped_at = None

    # ------------------------------------------------------------ before and after the run

    async def before(self, teachers: Mapping[str, CompletionPort]) -> list[str]:
        """Evaluate the student and every teacher; return a line for each and each set.

        A failure is raised: what fails now would fail again.
        """
        lines: list[str] = []
        if not self._config.before:
            return lines
        for name, each in self._sets.items():
            row = await self._measure(0, name, each.plan)
            lines.append(f"student before{self._on(name)}: {row.report.line()}")
        for teacher, port in teachers.items():
            reports = self._teachers[teacher] = {}
            for name, each in self._sets.items():
                report = reports[name] = await self._evaluate(port, each, each.plan)
                lines.append(f"{in_words(teacher)}{self._on(name)}: {report.line()}")
        return lines

    async def after(self, updates: int) -> list[str]:
        """Evaluate the student's last weights, once nothing else is evaluated; return the lines."""
        await self.finish()
        if not self._config.after:
            return []
        await self._complete(updates, concurrency=None)
        found = [row for row in self._rows if row.update == updates]
        return [f"student after{self._on(row.set)}: {row.report.line()}" for row in found]

    # ------------------------------------------------------------ while it trains

    def falls_on(self, updates: int) -> bool:
        """Return whether an evaluation of evaluation.every belongs to the weights after these."""
        every = self._config.every
        return bool(self._sets and every and updates) and updates % every == 0

    def live(self, updates: int) -> None:
        """Begin in the background what is due now that these weights are live on the servers.

        Where training waits for evaluations `waited_for` does it; the last weights are `after`'s.
        """
        if not self.falls_on(updates):
            return
        if self._left_to_after(updates):
            self._pending.append(updates)
        elif self._running:
            self.skipped += 1
            if self.skipped == 1:
                self._run.say(
                    f"the evaluation after {updates} updates is skipped, because that after "
                    f"{self._pending[0]} still runs; more of this kind are only counted "
                    "(evaluations_skipped)"
                )
        else:
            self._pending.append(updates)
            if not self._config.blocks:
                self._begin()

    async def waited_for(self, updates: int) -> None:
        """Evaluate what `live` left for a moment at which training waits."""
        if updates in self._pending and not self._left_to_after(updates):
            self._begin()
            await self.finish()

    async def again(self) -> None:
        """Evaluate what was pending in the checkpoint that the run continues from."""
        if self._pending and not self._running:
            self._begin()
        if self._config.blocks:
            await self.finish()

    async def finish(self) -> None:
        """Wait until nothing is evaluated in the background."""
        if self._task is not None:
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()

    def interrupt(self) -> None:
        """Stop evaluating, because the run is about to be interrupted; what runs stays pending."""
        if self._task is not None:
            self._task.cancel()

    async def abandon(self) -> None:
        """Stop evaluating, and wait until that is so; what runs stays pending."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _left_to_after(self, updates: int) -> bool:
        return updates == self._last_update and self._config.after

    def _begin(self) -> None:
        assert not self._running
        self._task = asyncio.create_task(
            self._in_background(), name=f"evaluation after {self._pending[0]} updates"
        )

    async def _in_background(self) -> None:
        for updates in tuple(self._pending):
            await self._complete(updates, concurrency=self._config.concurrency)
            self._stop_early(updates)

    async def _complete(self, updates: int, *, concurrency: int | None) -> None:
        """Evaluate the sets that have no row of these updates. concurrency: None: of the plan."""
        done = {row.set for row in self._rows if row.update == updates}
        for name, each in self._sets.items():
            if name in done:
                continue
            plan = each.plan
            if concurrency is not None:
                plan = replace(plan, concurrency=concurrency)
            try:
                row = await self._measure(updates, name, plan)
            except Exception as error:  # noqa: BLE001  no figure is worth a run
                self._fails(updates, name, error)
                continue
            self._run.say(f"after {updates} updates{self._on(name)}: {row.report.line()}")
        if updates in self._pending:
            self._pending.remove(updates)

    async def _measure(self, updates: int, name: str, plan: EvaluationPlan) -> Evaluated:
        """Evaluate a set and record it."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        report = await self._evaluate(self._run.port(), self._sets[name], plan)
        row = Evaluated(
            update=updates,
            set=name,
            lag_steps=max(0, self._run.updates() - updates),
            seconds=clock() - began_s,
            time_s=self._run.elapsed_s(),
            unix_time_s=time.time(),
            report=report,
        )
        self._run.record(row.row())
        self._rows.append(row)
        return row

    async def _evaluate(
        self, port: CompletionPort, each: EvaluatedSet, plan: EvaluationPlan
    ) -> EvaluationReport:
        return await evaluate(port, each.prompts, self._judge, plan, self._run.playing)

    def _fails(self, updates: int, name: str, error: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            why = one_line(f"{type(error).__name__}: {error}")
            self._run.say(
                f"the evaluation of {name} after {updates} updates failed, the run goes on: {why}; "
                "more of this kind are only counted (evaluations_failed)"
            )

    def _stop_early(self, updates: int) -> None:
        config, name = self._config, self.best_set
        rows = [row for row in self._rows if row.set == name]
        count = without_gain(rows, config.best_metric, config.min_delta_pct)
        if 0 < config.patience <= count and self.stopped_at is None:
            self.stopped_at = updates
            self._run.say(
                f"the run stops early: {count} evaluations of {name} in a row brought no gain in "
                f"{config.best_metric} (evaluation.patience {config.patience})"
            )
            self._run.end_early()

    def _on(self, name: str) -> str:
        """Return what tells a set from the others, if there are any."""
        return f" on {name}" if len(self._sets) > 1 else ""


def in_words(teacher: str) -> str:
    """Return what a teacher's evaluation is called."""
    return teacher if teacher == DEFAULT_TEACHER else f"teacher {teacher}"
