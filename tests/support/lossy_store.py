"""Fakes of data workers for the real controller: what they hold is lost now and then."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from megatron_opd.buffer.rejection import RolloutRejected, SamplesLost, ScoreRejected
from megatron_opd.records.sample_figures import CacheSize, ScoreShape
from megatron_opd.records.types import (
    AnyRollout,
    AnySample,
    Batch,
    HeldRollout,
    HeldSample,
    Prompt,
    Rollout,
    Sample,
)
from tests.support.fakes import Figures, Fleet, Learner, held_rollout

SHAPE = ScoreShape(4, -0.7, 0.0, 0)


@dataclass
class LossyStore:
    """Holds rollouts and samples by uid, until some are lost.

    transfer_s: how long it takes until arrays are where they are asked for. lag_s: until it is
    known what was lost. rejected: share of the tries whose response or scores cannot be used.
    loses_more: whether some is lost when a batch is taken.
    """

    rng: np.random.Generator
    transfer_s: Callable[[], float]
    lag_s: Callable[[], float]
    rejected: float = 0.03
    loses_more: bool = True
    held: dict[int, tuple[str, Rollout | Sample]] = field(default_factory=dict)
    stages: dict[int, str] = field(default_factory=dict)
    lost_in: Counter[str] = field(default_factory=Counter)
    released: Counter[int] = field(default_factory=Counter)
    numbers: Counter[int] = field(default_factory=Counter)
    _lost: set[int] = field(default_factory=set)
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def keep(self, rollout: Rollout) -> HeldRollout:
        """Hold a rollout in place of an earlier one of its prompt."""
        uid = rollout.prompt.uid
        assert not self.released[uid], "it was trained on or dropped"
        self.numbers[uid] += 1
        key = f"{uid}-{self.numbers[uid]}"
        self.held[uid] = key, rollout
        self.stages[uid] = "waiting for its scores"
        return held_rollout(rollout, key, CacheSize(rollout.num_ids, 100))

    def must_hold(self, found: AnyRollout | AnySample) -> Rollout | Sample:
        """Return the arrays; SamplesLost."""
        rollout = found.rollout if isinstance(found, Sample | HeldSample) else found
        if not isinstance(rollout, HeldRollout):
            return found
        key, arrays = self.held.get(rollout.prompt.uid, ("", None))
        if key != rollout.key:
            raise SamplesLost(rollout.key)
        return arrays

    def lose(self, share: float) -> None:
        """Lose some of what is held."""
        self.lose_these([uid for uid in self.held if self.rng.random() < share])

    def lose_these(self, uids: Iterable[int]) -> None:
        """Lose what is held for these prompts."""
        for uid in uids:
            del self.held[uid]
            self.lost_in[self.stages[uid]] += 1
            self._lost.add(uid)
        self._event.set()

    def holds(self, sample: AnySample) -> bool:
        """Return whether a sample's arrays are there."""
        try:
            self.must_hold(sample)
        except SamplesLost:
            return False
        return True

    async def whole(self, found: AnyRollout | AnySample) -> Rollout | Sample:
        """Return the arrays that are there now."""
        arrays = self.must_hold(found)
        await asyncio.sleep(self.transfer_s())
        if isinstance(found, HeldRollout):
            return arrays.rollout if isinstance(arrays, Sample) else arrays
        return arrays

    def release(self, uids: Iterable[int]) -> None:
        """Let go of prompts' arrays, and count it."""
        for uid in uids:
            self.released[uid] += 1
            self.held.pop(uid, None)

    async def lost(self) -> Collection[int]:
        """Return what was lost, a little later."""
        await self._event.wait()
        await asyncio.sleep(self.lag_s())
        self._event.clear()
        found, self._lost = self._lost, set()
        return found


@dataclass
class HeldFleet(Fleet):
    """Leaves its responses with the store; some tries are rejected."""

    store: LossyStore | None = None

    async def generate(self, prompt: Prompt) -> HeldRollout:
        rollout = await super().generate(prompt)
        if self.store.rng.random() < self.store.rejected:
            raise RolloutRejected("empty_response")
        return self.store.keep(rollout)


@dataclass
class HeldTeacher:
    """Scores where the rollouts are held. reward: of a prompt's next try."""

    store: LossyStore
    duration_s: Callable[[], float]
    reward: Callable[[int], float | None]

    async def score(self, rollout: AnyRollout) -> AnySample:
        uid = rollout.prompt.uid
        self.store.must_hold(rollout)
        self.store.stages[uid] = "being scored"
        await asyncio.sleep(self.duration_s())
        arrays = self.store.must_hold(rollout)
        if self.store.rng.random() < self.store.rejected:
            raise ScoreRejected("nan")
        reward, whole = self.reward(uid), arrays.rollout if isinstance(arrays, Sample) else arrays
        sample = Sample(whole, np.full(whole.num_ids, -0.7, np.float32), reward)
        if isinstance(rollout, Rollout):
            return sample
        self.store.held[uid] = rollout.key, sample
        self.store.stages[uid] = "scored"
        return HeldSample(rollout, SHAPE, reward)


@dataclass
class TakingLearner(Learner):
    """Takes a batch's arrays first, one after another."""

    store: LossyStore | None = None

    async def train(self, batch: Batch) -> Figures:
        for sample in batch.samples:
            self.store.stages[sample.rollout.prompt.uid] = "in a batch"
        if self.store.loses_more and self.store.rng.random() < 0.2:
            self.store.lose(0.2)
        for sample in batch.samples:
            self.store.must_hold(sample)
            await asyncio.sleep(self.store.transfer_s() / len(batch.samples))
        for sample in batch.samples:
            self.store.stages[sample.rollout.prompt.uid] = "trained on"
        return await super().train(batch)
