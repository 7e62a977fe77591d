"""Runs trajectories in a data worker; the controller says which server samples each turn.

A trajectory is a task of this process. It wants one turn after another, an agent's several at
once; the controller is told of each, and orders it from a server of its choice. A turn that fails
is wanted again as often as rollout.attempts says (rollout/generator.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import GroupMember
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data_workers.messages import WantedTurn, WholeTrajectory
from megatron_opd.environments.playing import Playing
from megatron_opd.records.turns import SampledTurn
from megatron_opd.records.types import Prompt, Rollout
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scores import unscored
from megatron_opd.rollout.trajectories import TrajectoryGenerator
from sglang_bridge.protocol import RolloutReply, RolloutRequest


@dataclass(frozen=True, slots=True)
class Playroom:
    """Holds what trajectories are played with.

    playing: has been entered. vocab_size: of the student. ending: of the run's turns. name: makes
    request names unique on servers that outlive this process.
    """

    config: Config
    playing: Playing
    vocab_size: int
    ending: Ending
    name: str

    def begin(self, key: str, prompt: Prompt, kept: Sequence[SampledTurn]) -> UnderWay:
        """Begin a trajectory with turns that it has finished."""
        return UnderWay(self, key, prompt, kept)


@dataclass(eq=False, slots=True)
class _Want:
    """Holds a turn that is wanted. made: by the server that was asked last."""

    request: RolloutRequest
    prefer: str
    given: asyncio.Future[RolloutReply]
    made: list[RolloutReply] = field(default_factory=list[RolloutReply])


class UnderWay:
    """Represents one trajectory, which begins at once; implements TurnFleet for its turns."""

    def __init__(
        self, room: Playroom, key: str, prompt: Prompt, kept: Sequence[SampledTurn]
    ) -> None:
        self.prompt, self._seed = prompt, room.config.run.seed
        self._wants: asyncio.Queue[_Want] = asyncio.Queue()
        self._told: dict[str, _Want] = {}
        """Those that the controller knows of, by the names of their requests."""
        name = f"{room.name}-{key}"
        turns = RolloutGenerator(room.config, self, room.vocab_size, name, room.ending.token_ids)
        self._generator = TrajectoryGenerator(turns, self, room.playing, self._seed)
        self._task = asyncio.create_task(self._generator.go_on(prompt, kept), name=f"play {key}")

    @property
    def member(self) -> GroupMember:
        """Returns the prompt with the turns that are finished."""
        turns = self._generator.under_way(self.prompt.uid)
        return GroupMember(prompt=self.prompt, turns=tuple(turns))

    async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
        """Ask for a turn; return it once the controller has had it sampled."""
        want = _Want(request, prefer, asyncio.get_running_loop().create_future())
        self._wants.put_nowait(want)
        return await want.given

    async def next(self) -> WantedTurn | Rollout:
        """Return what else is wanted, or the whole trajectory. Raises what ended it."""
        wants = asyncio.ensure_future(self._wants.get())
        try:
            await asyncio.wait({wants, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                return self._task.result()
            want = wants.result()
        finally:
            wants.cancel()
        name = want.request.rid
        self._told[name] = want
        return WantedTurn(name, want.prefer)

    async def sample(
        self, ask: Callable[[RolloutRequest], Awaitable[RolloutReply]], wanted: str, rid: str
    ) -> RolloutReply:
        """Let a server sample a turn that is wanted, in one try. SamplesLost: it is not."""
        want = self._told.get(wanted)
        if want is None:
            raise SamplesLost("this turn is not wanted")
        reply = await ask(msgspec.structs.replace(want.request, rid=rid))
        want.made[:] = [reply]
        return reply

    def give(self, wanted: str, failure: Exception | None) -> None:
        """Let the trajectory have a turn, or learn why there is none; nothing if it wants none."""
        want = self._told.pop(wanted, None)
        if want is None or want.given.done():  # the trajectory was given up
            return
        if failure is None and not want.made:
            failure = SamplesLost("no turn was sampled")
        if failure is None:
            want.given.set_result(want.made[0])
        else:
            want.given.set_exception(failure)

    def end(self) -> None:
        """Give the trajectory up."""
        self._task.cancel()
        self._task.add_done_callback(_looked_at)


def _looked_at(task: asyncio.Task[Rollout]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def described(rollout: Rollout) -> WholeTrajectory:
    """Describe a trajectory that the worker holds."""
    return WholeTrajectory(
        sizes=list(rollout.sizes),
        runs=list(rollout.runs),
        size=unscored(rollout).cache,
        geometric_logps=list(rollout.geometric_logps),
        spans=[(span.version, span.start, span.stop) for span in rollout.spans],
        finish_reason=rollout.finish_reason,
        engine=rollout.engine,
        restarts=rollout.restarts,
        reward=rollout.reward,
        turns=list(rollout.turns),
    )
