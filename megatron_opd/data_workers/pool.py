"""Represents the run's data workers to the controller: who does what, who holds what, who is lost.

Each server belongs to one worker, which makes all requests to it for work; who of a fleet's servers
gets a request is the fleet's choice, as without workers. What a worker that is lost held is
reported by `lost`, and its servers go to the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from functools import partial
from weakref import WeakSet

import msgspec

from megatron_opd.buffer.rejection import SampleRejected, SamplesLost
from megatron_opd.controller.snapshot_codec import decode_member
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.data_workers.checks import (
    generated_fault,
    judged_fault,
    looked_fault,
    scored_fault,
)
from megatron_opd.data_workers.connections import WorkerConnection, WorkerConnections
from megatron_opd.data_workers.faults import WorkerFailed
from megatron_opd.data_workers.fetched import fetched_fault, with_arrays
from megatron_opd.data_workers.messages import (
    Answer,
    Fetch,
    Fetched,
    Generate,
    Generated,
    JudgeCall,
    JudgedCall,
    Look,
    Looked,
    Release,
    ScoreCall,
    ScoredCall,
)
from megatron_opd.data_workers.requests import encode_request
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.types import (
    AnyRollout,
    AnySample,
    HeldRollout,
    HeldSample,
    Prompt,
    RightAnswer,
    Rollout,
    Sample,
    SequenceSize,
    VersionSpan,
)
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.wire.keys import RunKeys
from sglang_bridge.client import ServerClient
from sglang_bridge.deadlines import Deadlines
from sglang_bridge.errors import ServerUnreachable, one_line
from sglang_bridge.parse import require_synced
from sglang_bridge.protocol import Progress, RolloutRequest

logger = logging.getLogger(__name__)


class WorkersLost(RuntimeError):
    """Reports that no data worker is left."""


class WorkersUnreachable(RuntimeError):
    """Reports that data workers are there, and the learner's ranks cannot reach them."""


class WorkerPool:
    """Gives work to data workers over `connections`, which count, host, keys and max_bytes are for.

    Args:
        again: starts the worker of an index once more; None, or False: it is lost for good.
    """

    def __init__(
        self,
        count: int,
        host: str,
        keys: RunKeys,
        max_bytes: int,
        again: Callable[[int], bool] | None = None,
    ) -> None:
        self._count, self._again = count, again
        self.connections = WorkerConnections(count, host, keys, max_bytes, self._joined, self._gone)
        self._owners: dict[str, WorkerConnection] = {}
        self._held: dict[int, tuple[WorkerConnection, str]] = {}
        self._asked_for: WeakSet[ServerClient] = WeakSet()
        """Servers of which workers are asked how far they are."""
        self._lost: set[int] = set()
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._awaited = count
        self._coming: set[int] = set()
        """Those that are being started again."""
        self.workers_lost = 0
        """How often a worker was lost."""

    # ------------------------------------------------------------ life

    async def ready(self) -> None:
        """Return once every worker is there."""
        while len(self.connections.alive) < self._count:
            await self._until_changed()

    def give_up(self) -> None:
        """Note that a worker that was to be started again will not come."""
        self._awaited -= 1
        self._change()

    def never_came(self, index: int) -> None:
        """Note that a worker that was started again ended; one that had joined is lost as usual."""
        if index in self._coming and not self.connections.is_there(index):
            self._coming.discard(index)
            if self._again is None or not self._again(index):
                self.give_up()
            else:
                self._coming.add(index)

    # ------------------------------------------------------------ work

    async def generate(
        self,
        client: ServerClient,
        prompt: Prompt,
        request: RolloutRequest,
        started_s: float = 0.0,
        restarts: int = 0,
    ) -> HeldRollout:
        """Sample one completion at a client's server, in one try.

        BridgeError, ServerUnreachable also where the worker is lost meanwhile, as it is when its
        answer cannot be (checks.py). started_s, restarts: see Rollout.
        """
        worker = await self._owner(client.url)
        number = self.number()
        try:
            order = Generate(number, client.endpoint, encode_request(request))
            fault = partial(generated_fault, request, client.endpoint.known)
            work = self.connections.call(worker, order, Generated, fault)
            del order  # a prompt, while thousands of answers are awaited
            answer = await self.deadlines(client).within(request.rid, work)
            newest = max((version for version, *_ in answer.spans), default=0)
            require_synced(client.url, newest, client.known)
        except SamplesLost as error:
            raise ServerUnreachable(client.url, "/generate", str(error), sent=True) from None
        except BaseException:
            if worker.alive:  # the answer may be on its way, or here, and nobody waits for it now
                self.connections.send(worker, Release([request.rid]))
            raise
        self.hold(prompt.uid, worker, request.rid)
        prompt_tokens = len(prompt.token_ids_P)
        run = SampledRun(0, prompt_tokens, prompt_tokens + answer.tokens)
        return HeldRollout(
            prompt=prompt,
            worker=worker.name,
            key=request.rid,
            sizes=(SequenceSize(run.stop, answer.tokens, answer.ids),),
            cache=answer.size,
            geometric_logps=(answer.geometric_logp,),
            spans=tuple(VersionSpan(*span) for span in answer.spans),
            finish_reason=answer.finish_reason,
            started_s=started_s,
            finished_s=asyncio.get_running_loop().time(),
            engine=client.url,
            restarts=restarts,
            runs=(run,),
        )

    async def judge(self, rollout: HeldRollout, task: str | None, answer: RightAnswer) -> float:
        """Return the reward of a held response, whose task has a verifier.

        VerifierFailed. SamplesLost.
        """
        worker = self._holder(rollout)
        order = JudgeCall(self.number(), rollout.key, task, answer)
        reward = (await self.connections.call(worker, order, JudgedCall, judged_fault)).reward
        assert reward is not None, "that is a fault"
        return reward

    async def score(
        self,
        client: ServerClient,
        rollout: HeldRollout,
        ask: TeacherAsk,
        teacher_vocab_size: int,
        sequence: int = 0,
    ) -> tuple[HeldRollout, ScoreShape]:
        """Let a client's server score a sequence of what is held, in one try.

        Returns what is held then, and the shape of the sequence's scores.

        teacher_vocab_size: ids of the teacher. BridgeError. ScoreRejected. SamplesLost.
        """
        worker, number = self._holder(rollout), self.number()
        rid = f"{ask.rid}-{number}."  # the server may still be busy with an earlier try
        order = ScoreCall(
            number,
            client.endpoint,
            rollout.key,
            msgspec.structs.replace(ask, rid=rid),
            teacher_vocab_size,
            sequence,
        )
        fault = partial(scored_fault, rollout, ask, sequence)
        work = self.connections.call(worker, order, ScoredCall, fault)
        answer = await self.deadlines(client).within(rid, work)
        size = rollout.sizes[sequence]
        if (answer.ids, answer.size) != (size.ids, rollout.cache):  # the teacher selected
            sizes = list(rollout.sizes)
            sizes[sequence] = msgspec.structs.replace(size, ids=answer.ids)
            rollout = msgspec.structs.replace(rollout, sizes=tuple(sizes), cache=answer.size)
        return rollout, answer.shape

    # ------------------------------------------------------------ what is held

    def hold(self, uid: int, worker: WorkerConnection, key: str) -> None:
        """Note what a worker holds for a prompt; what was held before is let go of."""
        self.release([uid])
        self._held[uid] = worker, key

    def holds(self, sample: AnySample) -> bool:
        """Return whether the arrays of a sample are there, here or in a worker."""
        if not isinstance(sample, HeldSample):
            return True
        worker, key = self._held.get(sample.rollout.prompt.uid, (None, ""))
        return worker is not None and worker.alive and key == sample.rollout.key

    def source(self, sample: HeldSample) -> tuple[str, str]:
        """Return (address, key) for who takes the sample. SamplesLost."""
        return self._holder(sample.rollout).address, sample.rollout.key

    def whole(self, found: AnyRollout | AnySample) -> asyncio.Future[Rollout | Sample]:
        """Ask for arrays at once; they come later. SamplesLost: they are gone by then."""
        if not isinstance(found, HeldRollout | HeldSample):
            here: asyncio.Future[Rollout | Sample] = asyncio.get_running_loop().create_future()
            here.set_result(found)
            return here
        rollout = found.rollout if isinstance(found, HeldSample) else found
        try:
            worker = self._holder(rollout)
        except SamplesLost as error:
            lost: asyncio.Future[Rollout | Sample] = asyncio.get_running_loop().create_future()
            lost.set_exception(error)
            return lost
        asked = self.connections.asked(worker, Fetch(self.number(), rollout.key))
        return asyncio.ensure_future(self._filled(found, worker, asked))

    async def _filled(
        self,
        found: HeldRollout | HeldSample,
        worker: WorkerConnection,
        asked: asyncio.Future[Answer],
    ) -> Rollout | Sample:
        """Return what a worker sends. SamplesLost: it is not what it said, or nothing."""
        answer = self.connections.expected(worker, await asked, Fetched)
        try:
            member = decode_member(answer.member)
            fault = fetched_fault(found, member)
        except ValueError as error:
            raise self.connections.breach(worker, one_line(str(error))) from None
        if fault is not None:
            raise self.connections.breach(worker, f"it sent {fault}")
        return with_arrays(found, member)

    async def sample(self, sample: AnySample) -> Sample:
        """Return a sample with its arrays. SamplesLost."""
        found = await self.whole(sample)
        assert isinstance(found, Sample)
        return found

    def fetch(self, found: HeldRollout | HeldSample) -> Future[Rollout | Sample]:
        """Ask for arrays at once, for a thread that waits for them. SamplesLost."""
        future: Future[Rollout | Sample] = Future()

        def pass_on(asked: asyncio.Future[Rollout | Sample]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            error = asked.exception() if not asked.cancelled() else SamplesLost("the run ends")
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(asked.result())

        self.whole(found).add_done_callback(pass_on)
        return future

    async def loses_one_of(self, samples: Iterable[HeldSample], within_s: float) -> bool:
        """Return whether one of these samples is known to be lost before `within_s` is over.

        Ranks that could not take samples may know it before we do.
        """
        samples = list(samples)
        try:
            async with asyncio.timeout(within_s):
                while all(map(self.holds, samples)):
                    await self._until_changed()
        except TimeoutError:
            return False
        return True

    def release(self, uids: Iterable[int]) -> None:
        """Let go of what is held for these prompts."""
        by_worker: dict[WorkerConnection, list[str]] = {}
        for uid in uids:
            worker, key = self._held.pop(uid, (None, ""))
            if worker is not None and worker.alive:
                by_worker.setdefault(worker, []).append(key)
        for worker, keys in by_worker.items():
            self.connections.send(worker, Release(keys))

    async def lost(self) -> Collection[int]:
        """Return the prompts whose arrays were lost since the last call, once there are any.

        WorkersLost: no worker is left, and none is started again.
        """
        while not self._lost:
            if not self._awaited:
                raise WorkersLost("no data worker is left")
            await self._until_changed()
        found, self._lost = self._lost, set()
        return found

    # ------------------------------------------------------------ who is there

    def number(self) -> int:
        """Return a number for a call, which no other has."""
        return next(self._numbers)

    async def idlest(self) -> WorkerConnection:
        """Return the worker that plays the fewest trajectories; waits until there is one."""
        while not (alive := self.connections.alive):
            await self._until_changed()
        return min(alive, key=lambda worker: worker.trajectories)

    def _joined(self, worker: WorkerConnection) -> None:
        self._coming.discard(worker.index)
        self._owners.clear()  # servers are shared out anew
        for other in self.connections.alive:
            other.servers = 0
        self._change()

    def _gone(self, worker: WorkerConnection, why: str) -> None:
        self.workers_lost += 1
        held = {uid for uid, (holder, _) in self._held.items() if holder is worker}
        self._lost |= held
        for uid in held:
            del self._held[uid]
        self._owners = {url: owner for url, owner in self._owners.items() if owner is not worker}
        comes = self._again is not None and self._again(worker.index)
        self._awaited -= not comes
        if comes:
            self._coming.add(worker.index)
        logger.warning(
            "%s is lost (%s) with %d samples, which are sampled anew; %s",
            worker.name,
            why,
            len(held),
            "it is started again" if comes else f"{len(self.connections.alive)} are left",
        )
        self._change()

    async def _owner(self, url: str) -> WorkerConnection:
        """Return the worker that asks the server at `url`; waits until there is one."""
        while url not in self._owners:
            alive = self.connections.alive
            if alive:
                owner = min(alive, key=lambda worker: worker.servers)
                owner.servers += 1
                self._owners[url] = owner
            else:
                await self._until_changed()
        return self._owners[url]

    def deadlines(self, client: ServerClient) -> Deadlines:
        """Return those of a server's requests; a worker asks how far they are."""
        if client not in self._asked_for:
            self._asked_for.add(client)
            client.deadlines.ask = partial(self._progress, client)
        return client.deadlines

    async def _progress(self, client: ServerClient) -> Progress:
        """Return how far a server is. BridgeError: it cannot be asked, or its worker cannot ask."""
        worker = await self._owner(client.url)
        order = Look(self.number(), client.endpoint)
        try:
            answer = await self.connections.call(worker, order, Looked, looked_fault)
        except (SamplesLost, SampleRejected, VerifierFailed, WorkerFailed) as error:
            raise ServerUnreachable(client.url, "progress", str(error), sent=True) from None
        return Progress(answer.tokens, frozenset(answer.waiting))

    def _holder(self, rollout: HeldRollout) -> WorkerConnection:
        worker, key = self._held.get(rollout.prompt.uid, (None, ""))
        if worker is None or not worker.alive or key != rollout.key:
            raise SamplesLost(f"{rollout.worker} is lost")
        return worker

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_changed(self) -> None:
        await self._changed.wait()
