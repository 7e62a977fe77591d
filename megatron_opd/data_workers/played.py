"""Lets data workers play trajectories, each turn at a server that the fleet chooses.

The worker that plays a trajectory keeps its ids, draws and turns, and runs its environment; what
comes here of a turn is its length and its versions; of these a whole trajectory must consist. A
worker that is lost takes its trajectories along: they begin anew, as responses do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.snapshot import StartedTrajectory, place
from megatron_opd.controller.snapshot_codec import decode_member, encode_member
from megatron_opd.data_workers.checks import KnownTurn, PlayedRules, step_fault, turn_fault
from megatron_opd.data_workers.connections import WorkerConnection
from megatron_opd.data_workers.faults import failed
from megatron_opd.data_workers.messages import (
    MAX_ORDER_BYTES,
    Fetch,
    Fetched,
    GiveTurn,
    NextStep,
    Play,
    Release,
    SampleTurn,
    TrajectoryStep,
    TurnSampled,
    WantedTurn,
    WholeTrajectory,
)
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.records.turns import NotReplayed, SampledTurn
from megatron_opd.records.types import AnyRollout, HeldRollout, Prompt, VersionSpan, with_restarts
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError, one_line
from sglang_bridge.fleet import Fleet
from sglang_bridge.parse import require_synced
from sglang_bridge.protocol import RolloutReply

LARGEST_BYTES = MAX_ORDER_BYTES // 2
"""Bytes of turns that are given to a worker: an order, which is sent with others, has to fit."""


@dataclass(eq=False, slots=True)
class _Playing:
    """Holds what is known of a trajectory that a worker plays.

    turns: that are finished. thrown_away: tries that were, for a weight sync.
    """

    worker: WorkerConnection
    key: str
    turns: list[KnownTurn]
    thrown_away: int = 0


class PlayedByWorkers:
    """Implements rollout.resumed.Trajectories.

    slots: turns that are sampled at once. hold: holds them back during a weight sync. rules: what
    trajectories can be.
    """

    def __init__(
        self, pool: WorkerPool, fleet: Fleet, slots: int, hold: Rollouts, rules: PlayedRules
    ) -> None:
        self._pool, self._fleet, self._hold, self._rules = pool, fleet, hold, rules
        self._slots = asyncio.Semaphore(slots)
        self._under_way: dict[int, tuple[WorkerConnection, str]] = {}

    async def go_on(self, prompt: Prompt, kept: Sequence[SampledTurn]) -> AnyRollout:
        """Return one trajectory; see TrajectoryGenerator.go_on.

        NotReplayed also where its turns are too many for an order.
        """
        started = StartedTrajectory(prompt, kept)
        begun = encode_member(place(started))
        if kept and len(begun) > LARGEST_BYTES:
            raise NotReplayed(f"its turns have {len(begun)} bytes, {LARGEST_BYTES} at most")
        lost = 0
        while True:
            worker = await self._pool.idlest()
            try:
                return with_restarts(await self._played(worker, started, begun), lost)
            except SamplesLost:
                if worker.alive:  # it has no such trajectory: that is a fault, and no loss
                    raise
                lost += 1

    async def turns_of(self, uid: int) -> Sequence[SampledTurn]:
        """Ask a worker for the finished turns of a trajectory; none of one that is not there."""
        worker, key = self._under_way.get(uid, (None, ""))
        if worker is None or not worker.alive:
            return ()
        connections = self._pool.connections
        try:
            answer = await connections.asked(worker, Fetch(self._pool.number(), key))
            fetched = connections.expected(worker, answer, Fetched)
            try:
                member = decode_member(fetched.member)
            except ValueError as error:
                raise connections.breach(worker, one_line(str(error))) from None
        except SamplesLost:
            return ()
        return member.turns

    async def _played(
        self, worker: WorkerConnection, started: StartedTrajectory, begun: bytes
    ) -> AnyRollout:
        connections, number, prompt = self._pool.connections, self._pool.number(), started.prompt
        key, started_s = f"{prompt.uid}-{number}.", asyncio.get_running_loop().time()
        self._under_way[prompt.uid] = worker, key
        worker.trajectories += 1
        playing = _Playing(worker, key, [_known(turn.reply) for turn in started.turns])
        fault = partial(step_fault, self._rules, playing.turns)
        order: Play | NextStep = Play(number, key, begun)
        tasks: set[asyncio.Task[Any]] = set()
        try:
            while True:
                step = asyncio.create_task(connections.call(worker, order, TrajectoryStep, fault))
                tasks.add(step)
                while not step.done():
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                said = step.result().step
                if isinstance(said, WholeTrajectory):
                    held = self._held(worker, prompt, key, said, started_s)
                    return with_restarts(held, playing.thrown_away)
                tasks.add(asyncio.create_task(self._sampled(playing, said)))
                order = NextStep(self._pool.number(), key)
        except BaseException:
            if worker.alive:
                connections.send(worker, Release([key]))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            worker.trajectories -= 1
            self._under_way.pop(prompt.uid, None)

    async def _sampled(self, playing: _Playing, wanted: WantedTurn) -> None:
        """Let a server sample a turn, in one try, and the trajectory have it, or why there is none.

        Nothing, where the trajectory has ended meanwhile. WorkerFailed.
        """
        take = partial(self._taken, playing, wanted.rid)

        async def once() -> KnownTurn | BridgeError:
            try:
                return await self._fleet.ask(take, lambda turn: turn.tokens, prefer=wanted.prefer)
            except BridgeError as error:
                return error

        try:
            async with self._slots:  # whoever waits for a slot is not waited for by a weight sync
                found, aborted = await self._hold.counted(once)
        except SamplesLost:
            return  # whoever waits for the next step learns it too
        playing.thrown_away += aborted
        failure = None
        if isinstance(found, KnownTurn):
            playing.turns.append(found)
        else:
            failure = failed(0, found)
        if playing.worker.alive:
            order = GiveTurn(playing.key, wanted.rid, failure)
            self._pool.connections.send(playing.worker, order)

    async def _taken(self, playing: _Playing, wanted: str, client: ServerClient) -> KnownTurn:
        number = self._pool.number()
        rid = f"{wanted}{number}."  # the server may still be busy with one that was thrown away
        order = SampleTurn(number, client.endpoint, playing.key, wanted, rid)
        work = self._pool.connections.call(playing.worker, order, TurnSampled, turn_fault)
        turn = await self._pool.deadlines(client).within(rid, work)
        newest = max((version for version, *_ in turn.spans), default=0)
        require_synced(client.url, newest, client.known)
        return KnownTurn(turn.tokens, tuple(turn.spans), client.url)

    def _held(
        self,
        worker: WorkerConnection,
        prompt: Prompt,
        key: str,
        whole: WholeTrajectory,
        started_s: float,
    ) -> HeldRollout:
        self._pool.hold(prompt.uid, worker, key)
        return HeldRollout(
            prompt=prompt,
            worker=worker.name,
            key=key,
            sizes=tuple(whole.sizes),
            cache=whole.size,
            geometric_logps=tuple(whole.geometric_logps),
            spans=tuple(VersionSpan(*span) for span in whole.spans),
            finish_reason=whole.finish_reason,
            started_s=started_s,
            finished_s=asyncio.get_running_loop().time(),
            engine=whole.engine,
            restarts=whole.restarts,
            runs=tuple(whole.runs),
            reward=whole.reward,
            turns=tuple(whole.turns),
        )


def _known(reply: RolloutReply) -> KnownTurn:
    return KnownTurn(len(reply.output_ids_T), reply.spans, reply.url)
