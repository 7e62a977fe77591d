"""Samples and scores what a site was given; keeps what is finished until the learner has it.

Every prompt that was given is sampled, finished or let go. A finished one is kept until the learner
is known to have taken it: a learner gives no more prompts than there are slots, so whenever it
gives one more, it has taken the oldest of the finished ones. That bounds what is kept, and a
learner that starts again gets what the one before it lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from megatron_opd.buffer.rejection import SampleRejected
from megatron_opd.controller.ports import RolloutEngine, TeacherScorer
from megatron_opd.records.types import Prompt, Sample, rollout_here, sample_here
from megatron_opd.sites.messages import DETAIL_CHARS, Gone, SiteDone, SiteTask
from megatron_opd.sites.together import Failure
from megatron_opd.transport.samples import Frames, encode_sample
from sglang_bridge.arrays import unpack
from sglang_bridge.errors import one_line


@dataclass(frozen=True, slots=True)
class Finished:
    """Holds what became of a prompt.

    answer: Done as it was when sampling ended, or Gone. frames: of the sample. ended_s: when, on
    the event loop's clock. newest: version of its weights, None without a sample.
    """

    answer: SiteDone | Gone
    frames: Frames
    ended_s: float
    newest: int | None


class NoSuchTeacher(RuntimeError):
    """Reports in one line a prompt whose teacher the site does not have."""


def prompt_of(task: SiteTask) -> Prompt:
    """Return the prompt of a task. ValueError: its tokens cannot be read."""
    return Prompt(
        uid=task.uid,
        text=task.text,
        token_ids_P=unpack(task.ids, "<i4"),
        answer=task.answer,
        teacher=task.teacher,
        max_new_tokens=task.max_new_tokens,
        stop=task.stop,
        task=task.task,
        row_id=task.row_id,
        row=task.row,
        reward_weight=task.reward_weight,
        teacher_weight=task.teacher_weight,
    )


class SiteSampling:
    """Works on the prompts of one learner.

    Args:
        sampler: samples.
        scorer: scores what was sampled, or returns it without scores.
        slots: prompts that are here at once.
        score_slots: samples that are scored at once.
        vocab_sizes: of each teacher, by name; empty where the site asks none.
        num_draws: see transport/samples.py.
        ready: returns once there are weights to sample with.
        send: takes what is finished to the learner.

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
        ready: Callable[[], Awaitable[None]],
        send: Callable[[Finished], Coroutine[Any, Any, None]],
    ) -> None:
        self._sampler, self._scorer, self._slots = sampler, scorer, slots
        self._scoring = asyncio.Semaphore(score_slots)
        self._vocab_sizes, self._num_draws = vocab_sizes, num_draws
        self._ready, self._send = ready, send
        self._tasks: dict[int, SiteTask] = {}
        self._works: dict[int, asyncio.Task[None]] = {}
        self._finished: dict[int, Finished] = {}
        self._failure = Failure()
        self.delivered = self.begun_anew = 0

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
        prompt_of(task)
        if self._vocab_sizes and task.teacher not in self._vocab_sizes:
            raise NoSuchTeacher(
                f"the learner has a teacher {one_line(task.teacher, 80)!r}, which is none of "
                f"{', '.join(self._vocab_sizes)}: start the site with the run's file"
            )
        if len(self._tasks) >= self._slots and self._finished:
            self.forget([next(iter(self._finished))])
        self._tasks[task.uid] = task
        self._run(task.uid, self._work(task))

    def forget(self, uids: Collection[int]) -> None:
        """Let go of prompts; their requests end."""
        for uid in uids:
            self._tasks.pop(uid, None)
            self._finished.pop(uid, None)
            work = self._works.pop(uid, None)
            if work is not None:
                work.cancel()

    def keep_only(self, wanted: Collection[int]) -> None:
        """Let go of all prompts but these."""
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
                self._run(uid, self._send(finished))

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
            await self._ready()
            rollout = rollout_here(await self._sampler.generate(prompt_of(task)))
            async with self._scoring:
                sample = sample_here(await self._scorer.score(rollout))
            finished = self._encoded(sample)
        except SampleRejected as rejected:
            gone = Gone(task.uid, rejected.reason, one_line(rejected.detail, DETAIL_CHARS))
            finished = Finished(gone, (), clock(), None)
        self._finished[task.uid] = finished
        await self._send(finished)
        self.delivered += isinstance(finished.answer, SiteDone)

    def _encoded(self, sample: Sample) -> Finished:
        rollout = sample.rollout
        done = SiteDone(
            uid=rollout.prompt.uid,
            finish_reason=rollout.finish_reason,
            age_s=0.0,
            sent_s=0.0,
            duration_s=rollout.finished_s - rollout.started_s,
            engine=rollout.engine,
            restarts=rollout.restarts,
            shape=sample.scores(self._vocab_sizes.get(rollout.prompt.teacher, 1)),
            reward=sample.reward,
            overlong_penalty=sample.overlong_penalty,
            masked=sample.masked,
        )
        newest = max(span.version for span in rollout.spans)
        frames = encode_sample(sample, self._num_draws)
        return Finished(done, frames, rollout.finished_s, newest)
