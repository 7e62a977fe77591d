"""Samples and scores what a site was given; keeps what is finished until the learner has it.

Every prompt that was given is being sampled, finished or forgotten. A finished one is kept until
the learner is known to have taken it: a learner gives no more prompts than there are slots, so
whenever it gives one more, it has taken the oldest of the finished ones. That bounds what is kept,
and a learner that starts again gets what the one before it lost.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron_opd.buffer.rejection import SampleRejected
from megatron_opd.config.roles import Role, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.ports import RolloutEngine, TeacherScorer
from megatron_opd.data.judge import Judge
from megatron_opd.data_workers.reward import make_reward
from megatron_opd.environments.playing import Playing
from megatron_opd.inputs.models import CheckedModels, ending_of
from megatron_opd.records.mixtures import shares_fault
from megatron_opd.records.types import (
    AnyRollout,
    AnySample,
    Prompt,
    Sample,
    rollout_here,
    sample_here,
)
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.rollout.scores import unscored
from megatron_opd.rollout.trajectories import TrajectoryGenerator
from megatron_opd.sites.messages import DETAIL_CHARS, Gone, SiteDone, SiteTask
from megatron_opd.sites.outbox import Finished, SiteOutbox
from megatron_opd.sites.site_weights import SiteWeights
from megatron_opd.sites.tasks import FirstFailure
from megatron_opd.transport.samples import counted_draws, encode_sample
from sglang_bridge.arrays import unpack
from sglang_bridge.errors import one_line
from sglang_bridge.fleet import Fleet


class NoSuchTeacher(RuntimeError):
    """Reports in one line a prompt whose teacher the site does not have."""


def prompt_of(task: SiteTask) -> Prompt:
    """Return the prompt of a task. ValueError: its tokens or its mixture cannot be read."""
    fault = shares_fault(task.mixture)
    if fault is not None:
        raise ValueError(fault)
    return Prompt(
        uid=task.uid,
        text=task.text,
        token_ids_P=unpack(task.ids, "<i4"),
        answer=task.answer,
        teacher=task.teacher,
        teacher_ids_Q=None if task.teacher_ids is None else unpack(task.teacher_ids, "<i4"),
        mixture=task.mixture,
        max_new_tokens=task.max_new_tokens,
        stop=task.stop,
        task=task.task,
        row_id=task.row_id,
        row=task.row,
        reward_weight=task.reward_weight,
        teacher_weight=task.teacher_weight,
        messages=task.messages,
        tools=task.tools,
        columns=task.columns,
    )


class _Unscored:
    """Stands for teachers at a site that has none; the learner's site scores."""

    async def score(self, rollout: AnyRollout) -> AnySample:
        """Return the rollout without scores or reward."""
        return unscored(rollout_here(rollout))


@dataclass(frozen=True, slots=True)
class _HeldGenerator:
    """Samples as schedule.in_flight says, where versions are taken meanwhile."""

    rollouts: Rollouts
    generator: RolloutGenerator

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Sample one completion; see RolloutGenerator.generate."""
        return await self.rollouts.run(lambda: self.generator.generate(prompt))


def sampler_of(
    config: Config,
    student: Fleet,
    models: CheckedModels,
    rollouts: Rollouts,
    plays: Playing | None,
) -> RolloutEngine:
    """Return what samples at a site. config: the site's own. plays: None without environment."""
    name, ends = uuid.uuid4().hex[:8], ending_of(config, models).token_ids
    generator = RolloutGenerator(config, student, models.student.vocab_size, name, ends)
    if plays is None:
        return _HeldGenerator(rollouts, generator)
    return TrajectoryGenerator(generator, student, plays, config.run.seed, rollouts)


class SiteSampling:
    """Works on the prompts of one learner.

    Args:
        sampler: samples.
        scorer: scores what was sampled, or returns it without scores.
        slots: prompts that are here at once.
        score_slots: samples that are scored at once.
        vocab_sizes: of each teacher, by name; empty where the site asks none.
        num_draws: see transport/samples.py.
        weights: to sample with, once they are ready.
        outbox: sends what is finished to the learner.

    delivered: samples that were sent. begun_anew: prompts whose versions the learner went back
    behind.
    """

    def __init__(
        self,
        sampler: RolloutEngine,
        scorer: TeacherScorer,
        *,
        slots: int,
        score_slots: int,
        vocab_sizes: dict[str, int],
        num_draws: int,
        weights: SiteWeights,
        outbox: SiteOutbox,
    ) -> None:
        self._sampler, self._scorer, self._slots = sampler, scorer, slots
        self._scoring = asyncio.Semaphore(score_slots)
        self._vocab_sizes, self._num_draws = vocab_sizes, num_draws
        self._weights, self._outbox = weights, outbox
        self._tasks: dict[int, SiteTask] = {}
        self._works: dict[int, asyncio.Task[None]] = {}
        self._finished: dict[int, Finished] = {}
        self._failure = FirstFailure()
        self.delivered = self.begun_anew = 0

    @classmethod
    def of(
        cls,
        config: Config,
        fleets: Mapping[Role, Fleet],
        models: CheckedModels,
        judge: Judge | None,
        sampler: RolloutEngine,
        weights: SiteWeights,
        outbox: SiteOutbox,
        *,
        scores: bool,
    ) -> Self:
        """Return that of one site. config: the site's own. scores: whether it asks teachers."""
        run_id, vocab_size = uuid.uuid4().hex[:8], models.student.vocab_size
        ending = ending_of(config, models)
        scorer: TeacherScorer = _Unscored()
        if scores:
            reward = make_reward(judge, ending)
            scorer = FleetScorer(config, fleets, vocab_size, run_id, reward)
        return cls(
            sampler,
            scorer,
            slots=config.rollout.concurrency,
            score_slots=config.scoring.concurrency,
            vocab_sizes={
                teacher: models.models.served[role].vocab_size
                for teacher, role in teacher_roles(config).items()
                if scores
            },
            num_draws=counted_draws(config.estimator.support),
            weights=weights,
            outbox=outbox,
        )

    @property
    def holds(self) -> list[int]:
        """Returns the prompts that are here, finished ones too."""
        return sorted(self._tasks)

    def begin(self, task: SiteTask) -> None:
        """Work on a prompt, unless it is here already.

        Where there is no slot for it, the oldest of the finished ones was taken. ValueError: it
        cannot be read. NoSuchTeacher.
        """
        if task.uid in self._tasks:
            return
        for teacher, _ in prompt_of(task).shares:
            if self._vocab_sizes and teacher not in self._vocab_sizes:
                raise NoSuchTeacher(
                    f"the learner has a teacher {one_line(teacher, 80)!r}, which is none of "
                    f"{', '.join(self._vocab_sizes)}: start the site with the run's file"
                )
        if len(self._tasks) >= self._slots and self._finished:
            self.forget([next(iter(self._finished))])
        self._tasks[task.uid] = task
        self._run(task.uid, self._work(task))

    def forget(self, uids: Collection[int]) -> None:
        """Forget prompts; their requests end."""
        for uid in uids:
            self._tasks.pop(uid, None)
            self._finished.pop(uid, None)
            work = self._works.pop(uid, None)
            if work is not None:
                work.cancel()

    def keep_only(self, wanted: Collection[int]) -> None:
        """Forget all prompts but these."""
        self.forget(self._tasks.keys() - set(wanted))

    def deliver_again(self, limit: int, *, anew: bool) -> None:
        """Send all that is finished to a learner that started again.

        limit: its newest version. What was sampled with a newer one, which that learner never made,
        is sampled anew; with `anew` so is what is being sampled.
        """
        for uid, task in list(self._tasks.items()):
            finished = self._finished.get(uid)
            if finished is None:
                again = anew
            else:
                again = finished.newest is not None and finished.newest > limit
            if again:
                self.begun_anew += 1
                self.forget([uid])
                self._tasks[uid] = task
                self._run(uid, self._work(task))
            elif finished is not None:
                self._run(uid, self._outbox.deliver(finished))

    async def failed(self) -> None:
        """Return never; raise what a site cannot go on with."""
        await self._failure.wait()

    async def close(self) -> None:
        """End all work."""
        works = list(self._works.values())
        self.forget(self.holds)
        await asyncio.gather(*works, return_exceptions=True)

    def _run(self, uid: int, work: Coroutine[Any, Any, None]) -> None:
        running = self._works[uid] = asyncio.create_task(work)
        running.add_done_callback(lambda done: self._done(uid, done))

    def _done(self, uid: int, work: asyncio.Task[None]) -> None:
        if self._works.get(uid) is work:
            del self._works[uid]
        self._failure.watch(work)

    async def _work(self, task: SiteTask) -> None:
        clock = asyncio.get_running_loop().time
        try:
            await self._weights.ready()
            rollout = rollout_here(await self._sampler.generate(prompt_of(task)))
            async with self._scoring:
                sample = sample_here(await self._scorer.score(rollout))
            finished = self._encoded(sample)
        except SampleRejected as rejected:
            gone = Gone(task.uid, rejected.reason, one_line(rejected.detail, DETAIL_CHARS))
            finished = Finished(gone, (), clock(), None)
        self._finished[task.uid] = finished
        await self._outbox.deliver(finished)
        self.delivered += isinstance(finished.answer, SiteDone)

    def _encoded(self, sample: Sample) -> Finished:
        rollout = sample.rollout
        sizes = [self._vocab_sizes.get(name, 1) for name, _ in rollout.prompt.shares]
        done = SiteDone(
            uid=rollout.prompt.uid,
            finish_reason=rollout.finish_reason,
            age_s=0.0,
            sent_s=0.0,
            duration_s=rollout.finished_s - rollout.started_s,
            engine=rollout.engine,
            restarts=rollout.restarts,
            shape=sample.scores(max(sizes)),
            reward=sample.reward,
            overlong_penalty=sample.overlong_penalty,
            masked=sample.masked,
            own_reward=rollout.reward,
            turns=rollout.turns,
        )
        newest = max(span.version for span in rollout.spans)
        frames = encode_sample(sample, self._num_draws)
        return Finished(done, frames, rollout.finished_s, newest)
