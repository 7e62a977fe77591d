"""Declares what the controller needs: `cli` passes the real parts, tests pass fakes.

Every method may raise; an exception other than SampleRejected stops the run with it as the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_opd.buffer.pass_rates import CurriculumState
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.metrics.types import Accounting, Depths, UpdateFigures, WeightSyncReport
from megatron_opd.records.turns import SampledTurn
from megatron_opd.records.types import (
    AnyRollout,
    AnySample,
    Batch,
    LearnerTurn,
    Prompt,
    Rollout,
    Sample,
)

TakeState = Callable[[], Awaitable[ControllerState]]
"""Takes the state of a controller at the moment of the call, and returns it once it is whole."""


class RolloutEngine(Protocol):
    """Samples from the student's servers."""

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Sample one completion with its draw cache. Raises RolloutRejected to drop the sample."""
        ...


class TeacherScorer(Protocol):
    """Scores rollouts on the teachers' servers."""

    async def score(self, rollout: AnyRollout) -> AnySample:
        """Return the teacher log-probs of every cached id.

        Raises ScoreRejected to drop the sample, SamplesLost where the rollout is gone.
        """
        ...


class SampleStore(Protocol):
    """Keeps the arrays that HeldRollout and HeldSample stand for, in data workers."""

    def holds(self, sample: AnySample) -> bool:
        """Return whether the arrays of a sample are there, here or in a worker."""
        ...

    def whole(self, found: AnyRollout | AnySample) -> Awaitable[Rollout | Sample]:
        """Ask for the arrays at once; they come later. SamplesLost: they are gone by then."""
        ...

    def release(self, uids: Iterable[int]) -> None:
        """Let go of the arrays of prompts that are trained on or dropped."""
        ...

    async def lost(self) -> Collection[int]:
        """Return the prompts whose arrays were lost since the last call, once there are any."""
        ...


class UnfinishedTurns(Protocol):
    """Knows the finished turns of trajectories that are under way."""

    def turns_of(self, uid: int) -> Awaitable[Sequence[SampledTurn]]:
        """Ask for a prompt's turns, those that there are at the call; they come later."""
        ...

    def restore(self, uid: int, turns: Sequence[SampledTurn]) -> None:
        """Let a prompt's trajectory begin with the turns that a checkpoint has."""
        ...


class LearnerPort(Protocol):
    """Trains; at most one call is in progress, and none while a weight sync has the turn."""

    def prepare(self, sample: AnySample) -> AnySample:
        """Return a scored sample with what can be done for its update before the batch is whole."""
        ...

    async def train(self, batch: Batch) -> UpdateFigures:
        """Make one update on `batch`. SamplesLost: no update was made, for want of its arrays."""
        ...


class WeightSyncer(Protocol):
    """Syncs the learner's weights to the student's servers."""

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        """Return when `version` is live on every engine; at most one call is in progress.

        turn: with the learner, for whoever can go on without it. A failure raises, and leaves no
        engine running on half-updated weights.
        """
        ...

    async def make_room(self) -> None:
        """Return once the learner may use what it shares with the engines, until the next sync.

        Called before every update; there is nothing to do where they share nothing.
        """
        ...

    async def until_none_serves(self) -> None:
        """Return once no engine is left that holds the live version."""
        ...

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Sync the current version again whenever only engines without it are left.

        Runs until it is cancelled. current: the version whose weights the learner has; None: they
        are about to be synced anyway. learner: held by whoever uses it.
        """
        ...


class Guard(Protocol):
    """Watches what the controller does not talk to (processes, engines)."""

    async def watch(self) -> None:
        """Run until cancelled; raise as soon as something watched is gone."""
        ...

    async def diagnose(self, error: Exception) -> Exception | None:
        """Return what explains why another loop failed, if something watched is gone."""
        ...


class Observer(Protocol):
    """Records what happens, in order, on the event loop. It must be quick; its errors stop the run.

    Times are on the event loop's clock (monotonic seconds).
    """

    def started(self, now_s: float, depths: Depths) -> None:
        """Record that the loops are about to start."""
        ...

    def admitted(self, prompt: Prompt) -> None:
        """Record that a prompt took a permit."""
        ...

    def rolled_out(self, rollout: AnyRollout) -> None:
        """Record that a rollout finished."""
        ...

    def scored(self, sample: AnySample, started_s: float, finished_s: float) -> None:
        """Record that a teacher scored a rollout."""
        ...

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """Record that a sample was dropped and its permit returned."""
        ...

    def trained(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """Record that the learner made an update."""
        ...

    def updated(self, batch: Batch, depths: Depths) -> None:
        """Record that no weight sync follows the update on `batch`; its permits stay taken."""
        ...

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """Record that the version that `batch` produced is live.

        Its permits are returned, and those of the batches since the weight sync before.
        """
        ...

    def moved(self, depths: Depths) -> None:
        """Record that the number of samples in some stage changed, once a turn of the loop."""
        ...

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """Record that the loops have ended, by completion, failure or interruption."""
        ...


class Curriculum(Protocol):
    """Chooses prompts by the rewards of earlier responses; it is the source of the prompts too."""

    def judged(self, sample: AnySample) -> None:
        """Note the reward of a scored response, trained on or not."""
        ...

    def apply_noted(self) -> None:
        """Let the rewards noted so far decide about the prompts to come: a version went live."""
        ...

    @property
    def state(self) -> CurriculumState:
        """Returns what a later source of the run continues from."""
        ...


class Keeper(Protocol):
    """Keeps the state of a run, so that it can continue after a crash."""

    def due(self, updates: int) -> bool:
        """Return whether the state is to be kept once `updates` updates are live."""
        ...

    async def after_update(self, updates: int, state: TakeState) -> None:
        """Keep the run's state after `updates` updates; the next update waits for it.

        state: takes what to keep of the controller. All that is kept must be taken at once.
        """
        ...

    async def at_end(self, updates: int, state: TakeState) -> None:
        """Keep the state of a run that ends early, as `after_update`, unless it is kept already."""
        ...


@dataclass(frozen=True, slots=True)
class Engines:
    """Holds what samples and scores for one controller. hold, turns: see Ports."""

    rollout: RolloutEngine
    teacher: TeacherScorer
    hold: Rollouts | None = None
    turns: UnfinishedTurns | None = None


@dataclass(frozen=True, slots=True)
class Ports:
    """Holds the controller's neighbours.

    passed: what the prompts passed over, see PromptSource. hold: holds back single turns of
    trajectories during a weight sync; None: whole rollouts are held back. turns: of trajectories;
    None: what is sampled has one turn.
    """

    prompts: Iterable[Prompt]
    rollout: RolloutEngine
    teacher: TeacherScorer
    learner: LearnerPort
    weight_sync: WeightSyncer
    observer: Observer
    guard: Guard | None = None
    keeper: Keeper | None = None
    curriculum: Curriculum | None = None
    store: SampleStore | None = None
    hold: Rollouts | None = None
    passed: Callable[[], list[list[int]]] = list
    turns: UnfinishedTurns | None = None
