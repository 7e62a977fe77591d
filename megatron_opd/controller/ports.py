"""What the controller needs from its neighbours: `cli` wires real parts, tests wire fakes.

Every method may raise; an exception other than SampleRejected stops the run with it as the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.metrics.types import Accounting, Depths, PublicationReport, UpdateFigures
from megatron_opd.types import Batch, Prompt, Rollout, Sample


class RolloutEngine(Protocol):
    """The student fleet."""

    async def generate(self, prompt: Prompt) -> Rollout:
        """One completion with its draw cache. Raises RolloutRejected to drop the sample."""
        ...


class TeacherScorer(Protocol):
    """The teacher fleet."""

    async def score(self, rollout: Rollout) -> Sample:
        """Teacher log-probs of every cached id. Raises ScoreRejected to drop the sample."""
        ...


class LearnerPort(Protocol):
    """The learner. At most one call is in progress, and none while a publication is."""

    async def train(self, batch: Batch) -> UpdateFigures:
        """One update on `batch`."""
        ...


class Publisher(Protocol):
    """Moves the learner's weights to the student fleet."""

    async def publish(self, version: int) -> PublicationReport:
        """Return when `version` is live on every engine.

        A failure raises, and leaves no engine running on half-updated weights.
        """
        ...


class Guard(Protocol):
    """Watches what the controller does not talk to (processes, engines)."""

    async def watch(self) -> None:
        """Run until cancelled; raise as soon as something watched is gone."""
        ...

    async def diagnose(self) -> Exception | None:
        """After another loop failed: the deeper cause, if something watched is gone."""
        ...


class Observer(Protocol):
    """Told what happened, in order, on the event loop. Must be quick; what it raises stops the run.

    Times are on the event loop's clock (monotonic seconds).
    """

    def started(self, now_s: float, depths: Depths) -> None:
        """The loops are about to start."""
        ...

    def admitted(self, prompt: Prompt) -> None:
        """A prompt took a permit."""
        ...

    def rolled_out(self, rollout: Rollout) -> None:
        """A rollout finished."""
        ...

    def scored(self, sample: Sample, started_s: float, finished_s: float) -> None:
        """A teacher scored a rollout."""
        ...

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """A sample was dropped and its permit returned."""
        ...

    def trained(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """The learner made an update."""
        ...

    def published(self, batch: Batch, report: PublicationReport, depths: Depths) -> None:
        """The version that `batch` produced is live and its permits are returned."""
        ...

    def moved(self, depths: Depths) -> None:
        """The pipeline's filling changed (called often)."""
        ...

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """The loops have ended, by completion, failure or interruption."""
        ...


class Keeper(Protocol):
    """Keeps the state of a run, so that it can go on after a crash."""

    async def after_update(self, updates: int, state: Callable[[], ControllerState]) -> None:
        """`updates` updates are made and the last one is live. No update is made until it returns.

        state: what to keep now; it must be called before anything is awaited.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ports:
    """The controller's neighbours."""

    prompts: Iterable[Prompt]
    rollout: RolloutEngine
    teacher: TeacherScorer
    learner: LearnerPort
    publisher: Publisher
    observer: Observer
    guard: Guard | None = None
    keeper: Keeper | None = None
